"""Parameter attributes that tell Megatron how to reduce gradients and count norms.

    tensor_model_parallel   The parameter is sharded over the tensor group: the shards of all
                            ranks count in the gradient norm, else only tensor rank 0's copy.
    allreduce = False       The parameter belongs to an expert: it is replicated over the
                            expert-data group instead of the data group.
    sequence_parallel       The parameter is replicated over the tensor group, but each rank
                            applies it to its part of the tokens, so gradients are summed.

Megatron sets them during weight initialisation, which is skipped here. It also sets `allreduce`
only with more than one expert-parallel rank, but experts are replicated over other ranks than
dense parameters as soon as the expert tensor size differs from the tensor size. Query and key
norms are summed by Megatron because of their names. A scalar head processes all tokens on every
rank, so its gradient is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.reshard.mapping.model_mapping import (
    MEGATRON_OUTPUT_LAYER,
    is_expert_param,
    is_tensor_replicated,
)

if TYPE_CHECKING:
    import torch

    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_NO_TP_GRAD_SUM_SUFFIXES = ("q_layernorm.weight", "k_layernorm.weight", MEGATRON_OUTPUT_LAYER)


def set_grad_sync_flags(model: torch.nn.Module, shape: ModelShape, *, sequence: bool) -> None:
    """Set the attributes on every parameter; `sequence`: whether sequence parallelism is on."""
    for name, parameter in model.named_parameters():
        expert = is_expert_param(name)
        replicated = is_tensor_replicated(shape, name) and not expert
        parameter.tensor_model_parallel = not replicated
        parameter.allreduce = not expert
        summed = replicated and not name.endswith(_NO_TP_GRAD_SUM_SUFFIXES)
        parameter.sequence_parallel = sequence and summed

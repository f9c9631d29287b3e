"""Attributes on parameters by which Megatron decides whose gradient is summed and counted.

    tensor_model_parallel   every rank of the tensor group holds a part of its own: all count in
                            the gradient norm, instead of tensor rank 0's alone
    allreduce = False       an expert's: its replicas are the expert-data group, and its
                            optimizer's norm runs over all expert shards of the stage
    sequence_parallel       whole on every rank, but used on its share of the tokens only, so the
                            gradients of the tensor group are summed

Megatron sets them while it initialises weights, which is skipped here, and for experts only
where there are several expert ranks, although their replicas also differ from the dense ones'
where only their tensor size does. Norms of queries and keys, which see a part of the heads, are
summed by Megatron by their names. A scalar head sees all tokens on every rank: nothing to sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.reshard.names import OUTPUT_LAYER, is_expert, is_replicated

if TYPE_CHECKING:
    import torch

    from mega_agentrl.reshard.model_shape import ModelShape

_NOT_SUMMED_HERE = ("q_layernorm.weight", "k_layernorm.weight", OUTPUT_LAYER)


def mark(model: torch.nn.Module, shape: ModelShape, *, sequence: bool) -> None:
    """Set the marks on every parameter of a chunk. sequence: tensor ranks share the tokens."""
    for name, parameter in model.named_parameters():
        expert = is_expert(name)
        replicated = is_replicated(shape, name) and not expert
        parameter.tensor_model_parallel = not replicated
        parameter.allreduce = not expert
        summed = replicated and not name.endswith(_NOT_SUMMED_HERE)
        parameter.sequence_parallel = sequence and summed

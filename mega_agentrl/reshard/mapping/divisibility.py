"""Check that the parallel sizes divide a model.

    tensor           heads and the dense MLP's width; key/value heads in either direction, and then
                     the rows of q, k and v together
    pipeline*virtual layers; virtual stages need a pipeline
    expert           experts; expert_tensor: the width of one expert

Conditions among the sizes themselves (ranks, sequence parallelism) are checked by the
configuration, in `config.checks.cross_section`, which also repeats these as far as it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.reshard.mapping.model_parallel_rank import ModelParallelRank
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_WRONG_SIZE_CAUSE = "probable cause: a size chosen for another model"


def check_divisible(shape: ModelShape, parallel_rank: ModelParallelRank) -> None:
    """Raise a `ValueError` naming the first dimension of the model that a size does not divide."""
    tensor, stages = (
        parallel_rank.tensor_size,
        parallel_rank.pipeline_size * parallel_rank.virtual_size,
    )
    _check_divides("parallel.tensor", tensor, "num_attention_heads", shape.num_heads)
    _check_kv_heads(shape, tensor)
    if not shape.moe or not all(shape.moe.moe_layer_pattern):
        _check_divides("parallel.tensor", tensor, "intermediate_size", shape.ffn_hidden_size)
    if parallel_rank.virtual_size > 1 and parallel_rank.pipeline_size == 1:
        raise ValueError(
            f"parallel.virtual_pipeline={parallel_rank.virtual_size}: expected 1 with "
            "parallel.pipeline=1; probable cause: parallel.pipeline was removed alone"
        )
    _check_divides(
        "parallel.pipeline * parallel.virtual_pipeline",
        stages,
        "num_hidden_layers",
        shape.num_layers,
    )
    if shape.moe:
        _check_divides(
            "parallel.expert", parallel_rank.expert_size, "num_experts", shape.moe.num_experts
        )
        key = "parallel.expert_tensor"
        _check_divides(
            key,
            parallel_rank.expert_tensor_size,
            "moe_intermediate_size",
            shape.moe.ffn_hidden_size,
        )
    elif parallel_rank.expert_size > 1:
        raise ValueError(
            f"parallel.expert={parallel_rank.expert_size}: expected 1, the model has no experts; "
            f"{_WRONG_SIZE_CAUSE}"
        )


def _check_kv_heads(shape: ModelShape, tensor: int) -> None:
    heads = shape.num_kv_heads
    if heads % tensor and tensor % heads:
        raise ValueError(
            f"parallel.tensor={tensor}: the model's num_key_value_heads is {heads}; expected a "
            f"divisor or a multiple of it; {_WRONG_SIZE_CAUSE}"
        )
    rows = (shape.num_heads + 2 * heads) * shape.head_dim
    _check_divides("parallel.tensor", tensor, "rows of q, k and v", rows)


def _check_divides(key: str, parts: int, what: str, count: int) -> None:
    if count % parts:
        raise ValueError(
            f"{key}={parts}: the model's {what} is {count}, which is not a multiple of it; "
            f"expected a size that divides {count}; {_WRONG_SIZE_CAUSE}"
        )

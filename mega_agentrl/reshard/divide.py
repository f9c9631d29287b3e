"""Which cuts divide a model.

    tensor           heads, the dense MLP's width; key/value heads either way round, and then
                     the rows of q, k and v together
    pipeline*virtual layers; virtual stages need a pipeline
    expert           experts; expert_tensor: the width of one expert

Conditions among the sizes themselves (ranks, sequence parallelism) are the configuration's,
in `config.check`, which also repeats these, as far as it can from plain numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.reshard.model_shape import ModelShape
    from mega_agentrl.reshard.place import Place

_CAUSE = "probable cause: a size chosen for another model"


def check_divisible(shape: ModelShape, place: Place) -> None:
    """Raise `ValueError` naming the first size of the model that the cut does not divide."""
    tensor, stages = place.tensor_size, place.pipeline_size * place.virtual_size
    _divides("parallel.tensor", tensor, "num_attention_heads", shape.num_heads)
    _check_kv_heads(shape, tensor)
    if not shape.moe or not all(shape.moe.sparse):
        _divides("parallel.tensor", tensor, "intermediate_size", shape.ffn)
    if place.virtual_size > 1 and place.pipeline_size == 1:
        raise ValueError(
            f"parallel.virtual={place.virtual_size}: expected 1 with parallel.pipeline=1; "
            "probable cause: the pipeline was taken away alone"
        )
    _divides("parallel.pipeline * parallel.virtual", stages, "num_hidden_layers", shape.num_layers)
    if shape.moe:
        _divides("parallel.expert", place.expert_size, "num_experts", shape.moe.num_experts)
        key = "parallel.expert_tensor"
        _divides(key, place.expert_tensor_size, "moe_intermediate_size", shape.moe.ffn)
    elif place.expert_size > 1:
        raise ValueError(
            f"parallel.expert={place.expert_size}: expected 1, the model has no experts; {_CAUSE}"
        )


def _check_kv_heads(shape: ModelShape, tensor: int) -> None:
    heads = shape.num_kv_heads
    if heads % tensor and tensor % heads:
        raise ValueError(
            f"parallel.tensor={tensor}: the model's num_key_value_heads is {heads}; expected a "
            f"divisor or a multiple of it; {_CAUSE}"
        )
    rows = (shape.num_heads + 2 * heads) * shape.head_dim
    _divides("parallel.tensor", tensor, "rows of q, k and v", rows)


def _divides(key: str, parts: int, what: str, count: int) -> None:
    if count % parts:
        raise ValueError(
            f"{key}={parts}: the model's {what} is {count}, which is not a multiple of it; "
            f"expected a size that divides {count}; {_CAUSE}"
        )

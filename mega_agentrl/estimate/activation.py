"""Bytes of activations that a policy rank keeps for the backward pass of its micro-batches.

Nothing is recomputed in the layers, so what each operation saves adds up. Per token, with
tensor ranks t, h' = h/t under sequence parallelism and h without, q and kv the local widths of
queries and of keys, f the local inner width of the MLP:

    two norms         their input, the normalised input and their output      3 h' each
    attention         what q/k/v are cut from, normalised and rotated copies, its result
    MLP               inner products before and after the activation           3 f
    experts           the same for every copy of a token that the rank's experts get, and the
                      token itself: k copies of h and 3 f, times the imbalance of the routing

A GPU runs fused kernels (norm, activation, attention over rows of any length); without them a
norm keeps a float32 copy, the activation three more products, the attention gathered copies.
Transformer Engine's layers keep a little less than Megatron's own, which are counted.

A pipeline stage has several micro-batches under way at once: `in_flight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.policy_schema import ParallelConfig
    from mega_agentrl.reshard.model_shape import ModelShape

_FLOAT_BYTES = 4
_INT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How the layers run. item_bytes: of weights and activations. fused: as on GPUs."""

    item_bytes: int = 2
    fused: bool = True


def stage_activations(
    shape: ModelShape,
    layout: ParallelConfig,
    stage: int,
    tokens: int,
    kernels: Kernels,
    *,
    num_micro_batches: int,
    imbalance: float = 1.0,
) -> float:
    """Bytes kept at once on a rank of a pipeline stage.

    tokens: of a micro-batch on this rank. num_micro_batches: of an optimizer step, at most so
    many are under way. imbalance: tokens of the busiest expert rank over the mean.
    """
    per_chunk = shape.num_layers // (layout.pipeline * layout.virtual)
    total, last = 0.0, layout.pipeline - 1
    passes = in_flight(layout, stage, num_micro_batches)
    for chunk in range(layout.virtual):
        first = (chunk * layout.pipeline + stage) * per_chunk
        kept = sum(
            layer_activations(shape, layout, tokens, kernels, layer, imbalance=imbalance)
            for layer in range(first, first + per_chunk)
        )
        if stage == last and chunk == layout.virtual - 1:
            kept += _norm(shape.hidden, tokens / _sharers(layout), kernels)
            kept += tokens * shape.hidden * kernels.item_bytes  # what the head reads
        else:
            kept += tokens / _sharers(layout) * shape.hidden * kernels.item_bytes
        total += kept * passes[chunk]
    return total


def in_flight(layout: ParallelConfig, stage: int, num_micro_batches: int) -> list[int]:
    """By chunk, how many forward passes are ahead of their backward pass at most.

    Plain 1F1B: as many as there are stages from this one on. With virtual stages a rank starts
    2 (stages behind it) + (virtual - 1) stages + 1 passes before the first one back, chunk after
    chunk in rounds of as many as there are stages.
    """
    pipeline, virtual = layout.pipeline, layout.virtual
    if virtual == 1:
        return [min(pipeline - stage, num_micro_batches)]
    ahead = min(
        2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1, num_micro_batches * virtual
    )
    rounds = [0] * virtual
    for number in range(ahead):
        rounds[number // pipeline % virtual] += 1
    return rounds


def layer_activations(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: Kernels,
    layer: int,
    *,
    imbalance: float = 1.0,
) -> float:
    """Bytes that one layer keeps of one micro-batch, without the output it hands on."""
    shared = tokens / _sharers(layout)
    norms = 2 * (_norm(shape.hidden, shared, kernels) + shared * shape.hidden * kernels.item_bytes)
    kept = norms + _attention(shape, layout, tokens, kernels)
    if shape.is_sparse(layer):
        return kept + _experts(shape, layout, shared, kernels, imbalance)
    inner = shape.ffn / layout.tensor
    return kept + (3 if kernels.fused else 5) * inner * tokens * kernels.item_bytes


def _sharers(layout: ParallelConfig) -> int:
    """Ranks that share the tokens between the linears."""
    return layout.tensor if layout.sequence else 1


def _norm(width: float, rows: float, kernels: Kernels, heads: float = 1) -> float:
    """Input, its float32 scale and the normalised input; rows of `heads` vectors, `width` wide
    together.
    """
    wide = kernels.item_bytes if kernels.fused else _FLOAT_BYTES
    return rows * (width * (wide + kernels.item_bytes) + heads * _FLOAT_BYTES)


def _attention(shape: ModelShape, layout: ParallelConfig, tokens: float, kernels: Kernels) -> float:
    heads = shape.num_heads / layout.tensor
    kv_heads = max(1.0, shape.num_kv_heads / layout.tensor)
    query, key = heads * shape.head_dim, kv_heads * shape.head_dim
    # Each context rank reads the keys of both of its chunks' rows, (2C + 1) / 2 times its own.
    seen = layout.context + 0.5 if layout.context > 1 else 1.0
    item = kernels.item_bytes
    kept = 4 * tokens * shape.head_dim * item  # cosines and sines, for queries and for keys
    if shape.qk_norm:
        kept += _norm(query, tokens, kernels, heads) + _norm(key, tokens, kernels, kv_heads)
    kept += tokens * (query + seen * key) * item  # as the attention reads them
    kept += tokens * (query * item + heads * _FLOAT_BYTES)  # its result and normaliser
    if not kernels.fused:
        kept += tokens * (seen * key + query) * item  # values, result in its own order
        if shape.qk_norm and item == _FLOAT_BYTES:  # the key's norm reads a view of the whole
            kept += tokens * (query + key) * item
        return kept
    if layout.context > 1:
        return kept + tokens * seen * key * item
    if layout.tensor > shape.num_kv_heads:  # values are a view of what the ranks gathered
        width = shape.num_heads + 2 * shape.num_kv_heads
        return kept + tokens * width * shape.head_dim * item
    normed_apart = key if shape.qk_norm else 0.0  # the key's norm reads a view, too
    return kept + tokens * (query + 2 * key - normed_apart) * item


def _experts(
    shape: ModelShape, layout: ParallelConfig, tokens: float, kernels: Kernels, imbalance: float
) -> float:
    moe = shape.moe
    assert moe is not None, "a sparse layer has experts"
    routed = tokens * (
        moe.num_experts * (_FLOAT_BYTES + 1) + moe.top_k * (2 * _INT_BYTES + _FLOAT_BYTES)
    )
    share = layout.expert_tensor_size
    copies = tokens * moe.top_k * share * imbalance
    inner = moe.ffn / share * (3 if kernels.fused else 6)
    weight = _FLOAT_BYTES + _INT_BYTES * (1 if share == 1 else 2)
    return routed + copies * ((shape.hidden + inner) * kernels.item_bytes + weight)


def layer_workspace(
    shape: ModelShape,
    layout: ParallelConfig,
    tokens: float,
    kernels: Kernels,
    *,
    imbalance: float = 1.0,
) -> float:
    """Bytes that come and go in the backward pass of one layer: gradients of the MLP's inner
    products and of its input, and under sequence parallelism the gathered input.
    """
    gathered = 2 if layout.sequence else 1
    dense = tokens * (3 * shape.ffn / layout.tensor + gathered * shape.hidden)
    if shape.moe is None:
        return dense * kernels.item_bytes
    copies = tokens / _sharers(layout) * shape.moe.top_k * layout.expert_tensor_size * imbalance
    sparse = copies * (3 * shape.moe.ffn / layout.expert_tensor_size + 2 * shape.hidden)
    if all(shape.moe.sparse):
        return sparse * kernels.item_bytes
    return max(dense, sparse) * kernels.item_bytes

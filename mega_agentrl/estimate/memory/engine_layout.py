"""Derives the weight layout of vLLM's tensor ranks from the model shape, without vLLM.

A run traces vLLM's own loader instead (`generator.weights.loader_trace`), but a preflight check on
a login node has no vLLM. The weights of the supported model families are split as follows:

    vocabulary     by rows, padded to a multiple of 64 and of the number of ranks
    q, k, v        by rows in whole heads; with more ranks than key heads, ranks share a key head
    o, down        by columns; biases are replicated
    gate, up       by rows, also for every expert
    norms, router  replicated
    vision tower   as in the decoder; q, k and v are one tensor, of which a rank has rows of each
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, round_up
from mega_agentrl.reshard.mapping.model_mapping import (
    HF_LM_HEAD,
    HF_SCORE_HEAD,
    hf_embedding,
    hf_final_norm,
)
from mega_agentrl.reshard.mapping.model_shape import HeadKind
from mega_agentrl.reshard.mapping.partition import RowRange, replicate, slice_columns, stack_rows
from mega_agentrl.reshard.mapping.vision_shape import vision_tensor_shapes

if TYPE_CHECKING:
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

_VOCAB_MULTIPLE = 64
_VISION_ROW_LAYERS = (".qkv", ".gate_proj", ".up_proj", ".linear_fc1", "merger.mlp.0")
"""Ends of the names of tower layers that are split along their output."""
_VISION_COLUMN_LAYERS = ("attn.proj", ".down_proj", ".linear_fc2", "merger.mlp.2")
"""Ends of the names of tower layers that are split along their input."""


def engine_shard_layouts(shape: ModelShape, rank: int, size: int) -> list[ShardLayout]:
    """Return one shard layout per checkpoint tensor for tensor rank `rank` of `size`.

    Names are those of the checkpoint; tensors that vLLM stacks into one parameter stay separate.
    """
    shards = [_vocab_shard(hf_embedding(shape), shape, rank, size)]
    for layer in range(shape.num_layers):
        prefix = f"{shape.family.hf_decoder_prefix}layers.{layer}."
        shards += _attention_shards(shape, f"{prefix}self_attn.", rank, size)
        shards += _mlp_shards(shape, f"{prefix}mlp.", rank, size, sparse=shape.is_moe_layer(layer))
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shards.append(_replicated_shard(prefix + norm, (shape.hidden_size,)))
    shards.append(_replicated_shard(hf_final_norm(shape), (shape.hidden_size,)))
    if shape.head is HeadKind.scalar:
        shards.append(_replicated_shard(HF_SCORE_HEAD, (1, shape.hidden_size)))
    elif not shape.tie_word_embeddings:
        shards.append(_vocab_shard(HF_LM_HEAD, shape, rank, size))
    if shape.vision is not None:
        hf_prefix = shape.family.hf_vision_prefix
        shards += [
            _vision_shard(f"{hf_prefix}{name}", full, rank, size)
            for name, full in vision_tensor_shapes(shape.vision).items()
        ]
    return shards


def num_elements(shards: list[ShardLayout]) -> int:
    """Return the number of elements of all shards, padding included."""
    return sum(prod(shard.shape) for shard in shards)


def _vision_shard(name: str, full: tuple[int, ...], rank: int, size: int) -> ShardLayout:
    layer = name.rpartition(".")[0]
    if layer.endswith(_VISION_ROW_LAYERS):
        parts = 3 if layer.endswith("qkv") else 1
        rows = full[0] // parts
        ranges = [
            RowRange(name, part * rows + rank * rows // size, rows // size) for part in range(parts)
        ]
        return stack_rows(name, ranges, full[1:])
    if layer.endswith(_VISION_COLUMN_LAYERS) and name.endswith(".weight"):
        return slice_columns(name, name, (full[0], full[1]), rank=rank, size=size)
    return _replicated_shard(name, full)


def _replicated_shard(name: str, full: tuple[int, ...]) -> ShardLayout:
    return replicate(name, name, full)


def _vocab_shard(name: str, shape: ModelShape, rank: int, size: int) -> ShardLayout:
    rows = round_up(shape.vocab_size, lcm(_VOCAB_MULTIPLE, size)) // size
    valid = max(0, min(rows, shape.vocab_size - rank * rows))
    blocks: tuple[Block, ...] = ()
    if valid:
        hf_rect = Rect((rank * rows, 0), (rank * rows + valid, shape.hidden_size))
        blocks = (Block(name, hf_rect, Rect.whole((valid, shape.hidden_size))),)
    return ShardLayout(name, (rows, shape.hidden_size), blocks)


def _attention_shards(
    shape: ModelShape, prefix: str, rank: int, size: int
) -> Iterator[ShardLayout]:
    width = shape.head_dim
    queries = shape.num_heads // size * width
    keys = max(1, shape.num_kv_heads // size) * width
    first_key = rank * shape.num_kv_heads // size * width
    spans = {"q": (rank * queries, queries), "k": (first_key, keys), "v": (first_key, keys)}
    for letter, (start, count) in spans.items():
        name = f"{prefix}{letter}_proj"
        yield from _split_rows(name, start, count, shape.hidden_size, bias=shape.qkv_bias)
    full = (shape.hidden_size, shape.num_heads * width)
    yield from _split_columns(f"{prefix}o_proj", full, rank, size, bias=shape.o_proj_bias)
    if shape.qk_norm:
        for letter in "qk":
            yield _replicated_shard(f"{prefix}{letter}_norm.weight", (width,))


def _mlp_shards(
    shape: ModelShape, prefix: str, rank: int, size: int, *, sparse: bool
) -> Iterator[ShardLayout]:
    inner, names = shape.ffn_hidden_size, [prefix]
    if sparse and shape.moe is not None:
        yield _replicated_shard(f"{prefix}gate.weight", (shape.moe.num_experts, shape.hidden_size))
        inner = shape.moe.ffn_hidden_size
        names = [f"{prefix}experts.{expert}." for expert in range(shape.moe.num_experts)]
    width, bias = inner // size, shape.mlp_bias and not sparse
    for name in names:
        for projection in ("gate", "up"):
            yield from _split_rows(
                f"{name}{projection}_proj", rank * width, width, shape.hidden_size, bias=bias
            )
        full = (shape.hidden_size, inner)
        yield from _split_columns(f"{name}down_proj", full, rank, size, bias=bias)


def _split_rows(
    name: str, start: int, count: int, width: int, *, bias: bool
) -> Iterator[ShardLayout]:
    row_shapes: dict[str, tuple[int, ...]] = {"weight": (width,)} | ({"bias": ()} if bias else {})
    for kind, row_shape in row_shapes.items():
        yield stack_rows(f"{name}.{kind}", [RowRange(f"{name}.{kind}", start, count)], row_shape)


def _split_columns(
    name: str, full: tuple[int, int], rank: int, size: int, *, bias: bool
) -> Iterator[ShardLayout]:
    yield slice_columns(f"{name}.weight", f"{name}.weight", full, rank=rank, size=size)
    if bias:
        yield _replicated_shard(f"{name}.bias", full[:1])

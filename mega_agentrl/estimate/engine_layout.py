"""What each tensor rank of a vLLM engine holds, from the model's shape, without vLLM.

The run itself learns this from vLLM's own loader (`generator.trace`); a login node has no vLLM.
Of the supported families the cut is known:

    vocabulary     rows, padded to a multiple of 64 and of the ranks
    q, k, v        rows of whole heads; ranks beyond the key heads share one
    o, down        columns, their biases whole
    gate, up       rows, those of every expert too
    norms, router  whole
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod
from typing import TYPE_CHECKING

from mega_agentrl.reshard.cuts import Rows, columns, stacked, whole
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.model_shape import HeadKind
from mega_agentrl.reshard.names import EMBEDDING, FINAL_NORM, LM_HEAD, SCORE

if TYPE_CHECKING:
    from mega_agentrl.reshard.model_shape import ModelShape

_VOCAB_MULTIPLE = 64


def engine_layout(shape: ModelShape, rank: int, size: int) -> list[ShardLayout]:
    """Parameters of tensor rank `rank` of `size`, one of ours for each tensor of the checkpoint.

    Names are the checkpoint's; rows that vLLM stacks into one parameter are apart here.
    """
    shards = [_vocabulary(EMBEDDING, shape, rank, size)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shards += _attention(shape, f"{prefix}self_attn.", rank, size)
        shards += _mlps(shape, f"{prefix}mlp.", rank, size, sparse=shape.is_sparse(layer))
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shards.append(_whole(prefix + norm, (shape.hidden,)))
    shards.append(_whole(FINAL_NORM, (shape.hidden,)))
    if shape.head is HeadKind.scalar:
        shards.append(_whole(SCORE, (1, shape.hidden)))
    elif not shape.tied:
        shards.append(_vocabulary(LM_HEAD, shape, rank, size))
    return shards


def num_elements(shards: list[ShardLayout]) -> int:
    """Of all parameters, padding included."""
    return sum(prod(shard.shape) for shard in shards)


def _whole(name: str, full: tuple[int, ...]) -> ShardLayout:
    return whole(name, name, full)


def _vocabulary(name: str, shape: ModelShape, rank: int, size: int) -> ShardLayout:
    multiple = lcm(_VOCAB_MULTIPLE, size)
    rows = -(-shape.vocab // multiple) * multiple // size
    valid = max(0, min(rows, shape.vocab - rank * rows))
    blocks: tuple[Block, ...] = ()
    if valid:
        hf_rect = Rect((rank * rows, 0), (rank * rows + valid, shape.hidden))
        blocks = (Block(name, hf_rect, Rect.whole((valid, shape.hidden))),)
    return ShardLayout(name, (rows, shape.hidden), blocks)


def _attention(shape: ModelShape, prefix: str, rank: int, size: int) -> Iterator[ShardLayout]:
    width = shape.head_dim
    queries = shape.num_heads // size * width
    keys = max(1, shape.num_kv_heads // size) * width
    first = rank * shape.num_kv_heads // size * width
    spans = {"q": (rank * queries, queries), "k": (first, keys), "v": (first, keys)}
    for letter, (start, count) in spans.items():
        name = f"{prefix}{letter}_proj"
        yield from _row_cut(name, start, count, shape.hidden, bias=shape.qkv_bias)
    full = (shape.hidden, shape.num_heads * width)
    yield from _column_cut(f"{prefix}o_proj", full, rank, size, bias=shape.out_bias)
    if shape.qk_norm:
        for letter in "qk":
            yield _whole(f"{prefix}{letter}_norm.weight", (width,))


def _mlps(
    shape: ModelShape, prefix: str, rank: int, size: int, *, sparse: bool
) -> Iterator[ShardLayout]:
    inner, names = shape.ffn, [prefix]
    if sparse and shape.moe is not None:
        yield _whole(f"{prefix}gate.weight", (shape.moe.num_experts, shape.hidden))
        inner = shape.moe.ffn
        names = [f"{prefix}experts.{expert}." for expert in range(shape.moe.num_experts)]
    part, bias = inner // size, shape.mlp_bias and not sparse
    for name in names:
        for half in ("gate", "up"):
            yield from _row_cut(f"{name}{half}_proj", rank * part, part, shape.hidden, bias=bias)
        full = (shape.hidden, inner)
        yield from _column_cut(f"{name}down_proj", full, rank, size, bias=bias)


def _row_cut(name: str, start: int, count: int, width: int, *, bias: bool) -> Iterator[ShardLayout]:
    tails: dict[str, tuple[int, ...]] = {"weight": (width,)} | ({"bias": ()} if bias else {})
    for kind, tail in tails.items():
        yield stacked(f"{name}.{kind}", [Rows(f"{name}.{kind}", start, count)], tail)


def _column_cut(
    name: str, full: tuple[int, int], rank: int, size: int, *, bias: bool
) -> Iterator[ShardLayout]:
    yield columns(f"{name}.weight", f"{name}.weight", full, rank=rank, size=size)
    if bias:
        yield _whole(f"{name}.bias", full[:1])

"""Layouts of rollout ranks as vLLM's loader makes them, written by hand: q, k and v in one
parameter, gate over up, experts stacked, key/value heads repeated, a padded vocabulary.

`tests/generator/weights/test_loader_trace.py` holds them against what vLLM really does.
"""

from __future__ import annotations

from math import lcm

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import (
    HF_EMBEDDING,
    HF_FINAL_NORM,
    HF_LM_HEAD,
    HF_SCORE_HEAD,
)
from mega_agentrl.reshard.mapping.model_shape import HeadKind
from mega_agentrl.reshard.mapping.partition import RowRange, replicate, slice_columns, stack_rows

VOCAB_MULTIPLE = 64


def rollout_layout(shape, rank, size):
    """Parameters of one tensor rank in vLLM's order."""
    shards = [_vocabulary("model.embed_tokens.weight", HF_EMBEDDING, shape, rank, size)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shards += _attention(shape, f"{prefix}self_attn.", rank, size)
        if shape.is_moe_layer(layer):
            shards += _experts(shape, f"{prefix}mlp.", rank, size)
        else:
            shards += _mlp(shape, f"{prefix}mlp.", rank, size)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            shards.append(replicate(prefix + norm, prefix + norm, (shape.hidden_size,)))
    shards.append(replicate(HF_FINAL_NORM, HF_FINAL_NORM, (shape.hidden_size,)))
    if shape.head is HeadKind.scalar:
        shards.append(replicate(HF_SCORE_HEAD, HF_SCORE_HEAD, (1, shape.hidden_size)))
    elif not shape.tie_word_embeddings:
        shards.append(_vocabulary(HF_LM_HEAD, HF_LM_HEAD, shape, rank, size))
    return shards


def engine_layouts(shape, size):
    """Layouts of all tensor ranks of an engine."""
    return [rollout_layout(shape, rank, size) for rank in range(size)]


def _vocabulary(name, hf_name, shape, rank, size):
    multiple = lcm(VOCAB_MULTIPLE, size)
    rows = -(-shape.vocab_size // multiple) * multiple // size
    valid = max(0, min(rows, shape.vocab_size - rank * rows))
    blocks = ()
    if valid:
        hf_rect = Rect((rank * rows, 0), (rank * rows + valid, shape.hidden_size))
        blocks = (Block(hf_name, hf_rect, Rect.whole((valid, shape.hidden_size))),)
    return ShardLayout(name, (rows, shape.hidden_size), blocks)


def _attention(shape, prefix, rank, size):
    width = shape.head_dim
    queries = shape.num_heads // size
    groups = max(1, shape.num_kv_heads // size)
    first = rank * shape.num_kv_heads // size
    full = (shape.hidden_size, shape.num_heads * width)
    tails = {"weight": (shape.hidden_size,)} | ({"bias": ()} if shape.qkv_bias else {})
    for kind, tail in tails.items():
        rows = [RowRange(f"{prefix}q_proj.{kind}", rank * queries * width, queries * width)]
        rows += [RowRange(f"{prefix}{x}_proj.{kind}", first * width, groups * width) for x in "kv"]
        yield stack_rows(f"{prefix}qkv_proj.{kind}", rows, tail)
    name = f"{prefix}o_proj.weight"
    yield slice_columns(name, name, full, rank=rank, size=size)
    if shape.o_proj_bias:
        yield replicate(f"{prefix}o_proj.bias", f"{prefix}o_proj.bias", (shape.hidden_size,))
    if shape.qk_norm:
        for letter in "qk":
            name = f"{prefix}{letter}_norm.weight"
            yield replicate(name, name, (width,))


def _mlp(shape, prefix, rank, size):
    part = shape.ffn_hidden_size // size
    tails = {"weight": (shape.hidden_size,)} | ({"bias": ()} if shape.mlp_bias else {})
    for kind, tail in tails.items():
        halves = [
            RowRange(f"{prefix}{half}_proj.{kind}", rank * part, part) for half in ("gate", "up")
        ]
        yield stack_rows(f"{prefix}gate_up_proj.{kind}", halves, tail)
    name = f"{prefix}down_proj.weight"
    yield slice_columns(
        name, name, (shape.hidden_size, shape.ffn_hidden_size), rank=rank, size=size
    )
    if shape.mlp_bias:
        yield replicate(f"{prefix}down_proj.bias", f"{prefix}down_proj.bias", (shape.hidden_size,))


def _experts(shape, prefix, rank, size):
    moe, hidden = shape.moe, shape.hidden_size
    gate = f"{prefix}gate.weight"
    yield replicate(gate, gate, (moe.num_experts, hidden))
    part = moe.ffn_hidden_size // size
    first, second = [], []
    for expert in range(moe.num_experts):
        theirs = f"{prefix}experts.{expert}."
        rows = Rect((rank * part, 0), ((rank + 1) * part, hidden))
        for half, name in enumerate(("gate", "up")):
            local = Rect((expert, half * part, 0), (expert + 1, (half + 1) * part, hidden))
            first.append(Block(f"{theirs}{name}_proj.weight", rows, local))
        columns_of = Rect((0, rank * part), (hidden, (rank + 1) * part))
        local = Rect((expert, 0, 0), (expert + 1, hidden, part))
        second.append(Block(f"{theirs}down_proj.weight", columns_of, local))
    ours = f"{prefix}experts.routed_experts."
    shape_13 = (moe.num_experts, 2 * part, hidden)
    yield ShardLayout(f"{ours}w13_weight", shape_13, tuple(first))
    yield ShardLayout(f"{ours}w2_weight", (moe.num_experts, hidden, part), tuple(second))

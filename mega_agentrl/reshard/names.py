"""Hugging Face names against Megatron-core's, for dense Qwen3.

Owns the one mapping that loading, exporting and sending weights share. Megatron's side is
`GPTModel` with the local layer spec, layers numbered from 0 on each pipeline stage:

    linear_qkv  rows grouped by key/value head: [queries of the group, key, value] each
    linear_fc1  the rank's rows of gate_proj over its rows of up_proj
    embedding, output_layer  rows split over tensor ranks, padded to a multiple

Split over tensor ranks: QKV, fc1, embedding and output layer by rows, linear_proj and fc2 by
columns; norms are replicated. With tied embeddings and more than one stage the last stage
holds a second replica of the embedding as `output_layer.weight`.

Pure data; knows neither Megatron nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout

if TYPE_CHECKING:
    from mega_agentrl.reshard.model_shape import ModelShape

VOCAB_ROWS_MULTIPLE = 8
"""Rows of a vocabulary shard are a multiple of this: what bf16 tensor cores want."""

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Full shape of every tensor of the Hugging Face checkpoint, in checkpoint order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.hidden)}
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (query, shape.hidden),
            f"{prefix}self_attn.k_proj.weight": (key, shape.hidden),
            f"{prefix}self_attn.v_proj.weight": (key, shape.hidden),
            f"{prefix}self_attn.o_proj.weight": (shape.hidden, query),
            f"{prefix}self_attn.q_norm.weight": (shape.head_dim,),
            f"{prefix}self_attn.k_norm.weight": (shape.head_dim,),
            f"{prefix}mlp.gate_proj.weight": (shape.ffn, shape.hidden),
            f"{prefix}mlp.up_proj.weight": (shape.ffn, shape.hidden),
            f"{prefix}mlp.down_proj.weight": (shape.hidden, shape.ffn),
            f"{prefix}input_layernorm.weight": (shape.hidden,),
            f"{prefix}post_attention_layernorm.weight": (shape.hidden,),
        }
    shapes[FINAL_NORM] = (shape.hidden,)
    if not shape.tied:
        shapes[LM_HEAD] = (shape.vocab, shape.hidden)
    return shapes


def padded_vocab(shape: ModelShape, tensor_size: int) -> int:
    """Vocabulary rows over all tensor ranks, padding included."""
    multiple = VOCAB_ROWS_MULTIPLE * tensor_size
    return -(-shape.vocab // multiple) * multiple


def check_divisible(shape: ModelShape, *, tensor_size: int, pipeline_size: int) -> None:
    """Raise `ValueError` naming the first size the parallel layout does not divide."""
    for what, count, key, parts in (
        ("num_attention_heads", shape.num_heads, "parallel.tensor", tensor_size),
        ("num_key_value_heads", shape.num_kv_heads, "parallel.tensor", tensor_size),
        ("intermediate_size", shape.ffn, "parallel.tensor", tensor_size),
        ("num_hidden_layers", shape.num_layers, "parallel.pipeline", pipeline_size),
    ):
        if count % parts:
            raise ValueError(
                f"{key}={parts}: the model's {what} is {count}, which is not a multiple of it; "
                f"expected a {key} that divides {count}"
            )


def megatron_layout(
    shape: ModelShape,
    *,
    tensor_rank: int,
    tensor_size: int,
    pipeline_rank: int,
    pipeline_size: int,
) -> list[ShardLayout]:
    """Every parameter of one rank of `GPTModel` (local layer spec), in model order.

    Raises `ValueError` where the layout does not divide the model, or a rank is outside it.
    """
    check_divisible(shape, tensor_size=tensor_size, pipeline_size=pipeline_size)
    for key, rank, size in (
        ("tensor_rank", tensor_rank, tensor_size),
        ("pipeline_rank", pipeline_rank, pipeline_size),
    ):
        if not 0 <= rank < size:
            raise ValueError(f"{key}={rank}: expected 0..{size - 1}")
    first, last = pipeline_rank == 0, pipeline_rank == pipeline_size - 1
    layers = shape.num_layers // pipeline_size
    shards: list[ShardLayout] = []
    if first:
        name = "embedding.word_embeddings.weight"
        shards.append(_vocab_shard(name, EMBEDDING, shape, tensor_rank, tensor_size))
    for local in range(layers):
        shards += _layer(shape, local, pipeline_rank * layers + local, tensor_rank, tensor_size)
    if last:
        shards.append(_whole("decoder.final_layernorm.weight", FINAL_NORM, shape.hidden))
        if not (shape.tied and first):
            source = EMBEDDING if shape.tied else LM_HEAD
            name = "output_layer.weight"
            shards.append(_vocab_shard(name, source, shape, tensor_rank, tensor_size))
    return shards


def one_replica(ranks: Iterable[Iterable[ShardLayout]]) -> list[ShardLayout]:
    """The shards of several ranks without those whose rectangles an earlier rank holds too.

    What is left covers each element once: replicated norms and the tied embedding's second
    copy are dropped.
    """
    seen: set[tuple[tuple[str, Rect], ...]] = set()
    kept = []
    for shards in ranks:
        for shard in shards:
            key = tuple((block.hf_name, block.hf_rect) for block in shard.blocks)
            if key not in seen:
                kept.append(shard)
            seen.add(key)
    return kept


def _layer(
    shape: ModelShape, local: int, layer: int, tensor_rank: int, tensor_size: int
) -> list[ShardLayout]:
    ours, theirs = f"decoder.layers.{local}.", f"model.layers.{layer}."
    attention = f"{theirs}self_attn."
    query = shape.num_heads * shape.head_dim
    return [
        _whole(f"{ours}input_layernorm.weight", f"{theirs}input_layernorm.weight", shape.hidden),
        _columns(
            f"{ours}self_attention.linear_proj.weight",
            f"{attention}o_proj.weight",
            (shape.hidden, query),
            tensor_rank,
            tensor_size,
        ),
        _qkv(shape, f"{ours}self_attention.", attention, tensor_rank, tensor_size),
        _whole(
            f"{ours}self_attention.q_layernorm.weight",
            f"{attention}q_norm.weight",
            shape.head_dim,
        ),
        _whole(
            f"{ours}self_attention.k_layernorm.weight",
            f"{attention}k_norm.weight",
            shape.head_dim,
        ),
        _whole(
            f"{ours}pre_mlp_layernorm.weight",
            f"{theirs}post_attention_layernorm.weight",
            shape.hidden,
        ),
        _fc1(shape, ours, theirs, tensor_rank, tensor_size),
        _columns(
            f"{ours}mlp.linear_fc2.weight",
            f"{theirs}mlp.down_proj.weight",
            (shape.hidden, shape.ffn),
            tensor_rank,
            tensor_size,
        ),
    ]


def _whole(name: str, hf_name: str, size: int) -> ShardLayout:
    rect = Rect.whole((size,))
    return ShardLayout(name, (size,), (Block(hf_name, rect, rect),))


def _columns(
    name: str, hf_name: str, full: tuple[int, int], tensor_rank: int, tensor_size: int
) -> ShardLayout:
    rows, width = full[0], full[1] // tensor_size
    hf_rect = Rect((0, tensor_rank * width), (rows, (tensor_rank + 1) * width))
    return ShardLayout(name, (rows, width), (Block(hf_name, hf_rect, Rect.whole((rows, width))),))


def _rows(hf_name: str, hf_start: int, local_start: int, num_rows: int, width: int) -> Block:
    return Block(
        hf_name,
        Rect((hf_start, 0), (hf_start + num_rows, width)),
        Rect((local_start, 0), (local_start + num_rows, width)),
    )


def _qkv(
    shape: ModelShape, ours: str, theirs: str, tensor_rank: int, tensor_size: int
) -> ShardLayout:
    groups = shape.num_kv_heads // tensor_size
    query = shape.num_heads // shape.num_kv_heads * shape.head_dim
    stride = query + 2 * shape.head_dim
    blocks = []
    for local in range(groups):
        group, start = tensor_rank * groups + local, local * stride
        key = group * shape.head_dim
        blocks += [
            _rows(f"{theirs}q_proj.weight", group * query, start, query, shape.hidden),
            _rows(f"{theirs}k_proj.weight", key, start + query, shape.head_dim, shape.hidden),
            _rows(
                f"{theirs}v_proj.weight",
                key,
                start + query + shape.head_dim,
                shape.head_dim,
                shape.hidden,
            ),
        ]
    return ShardLayout(f"{ours}linear_qkv.weight", (groups * stride, shape.hidden), tuple(blocks))


def _fc1(
    shape: ModelShape, ours: str, theirs: str, tensor_rank: int, tensor_size: int
) -> ShardLayout:
    half = shape.ffn // tensor_size
    start = tensor_rank * half
    blocks = (
        _rows(f"{theirs}mlp.gate_proj.weight", start, 0, half, shape.hidden),
        _rows(f"{theirs}mlp.up_proj.weight", start, half, half, shape.hidden),
    )
    return ShardLayout(f"{ours}mlp.linear_fc1.weight", (2 * half, shape.hidden), blocks)


def _vocab_shard(
    name: str, hf_name: str, shape: ModelShape, tensor_rank: int, tensor_size: int
) -> ShardLayout:
    rows = padded_vocab(shape, tensor_size) // tensor_size
    start = tensor_rank * rows
    valid = max(0, min(shape.vocab - start, rows))
    blocks = (_rows(hf_name, start, 0, valid, shape.hidden),) if valid else ()
    return ShardLayout(name, (rows, shape.hidden), blocks)

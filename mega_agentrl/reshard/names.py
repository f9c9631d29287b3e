"""Hugging Face names against Megatron-core's, for every supported architecture.

Owns the one mapping that loading, exporting and sending weights share. Megatron's side is
`GPTModel`, layers numbered from 0 in each chunk of a pipeline rank (`place` says which chunks
a rank holds and what their names begin with). `decoder_layer` maps the layers; here stand

    embedding, output_layer  rows split over tensor ranks, padded to a multiple
    scalar head              `score.weight` [1, D] as `output_layer.weight`, whole on every rank
    final norm               whole

With tied embeddings and more than one stage the last stage holds a second replica of the
embedding as `output_layer.weight`.

Pure data; knows neither Megatron nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mega_agentrl.reshard.cuts import whole
from mega_agentrl.reshard.decoder_layer import layer_shapes, layer_shards
from mega_agentrl.reshard.divide import check_divisible
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.model_shape import HeadKind

if TYPE_CHECKING:
    from mega_agentrl.reshard.model_shape import ModelShape
    from mega_agentrl.reshard.place import Place

VOCAB_ROWS_MULTIPLE = 8
"""Rows of a vocabulary shard are a multiple of this: what bf16 tensor cores want."""

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_LAYER = "output_layer.weight"

_WHOLE_SUFFIXES = (
    "norm.weight", "layer_norm_weight", "router.weight", "linear_proj.bias", "linear_fc2.bias"
)  # fmt: skip


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Full shape of every tensor of the Hugging Face checkpoint, in model order."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.hidden)}
    for layer in range(shape.num_layers):
        shapes |= layer_shapes(shape, layer)
    shapes[FINAL_NORM] = (shape.hidden,)
    if shape.head is HeadKind.scalar:
        shapes[SCORE] = (1, shape.hidden)
    elif not shape.tied:
        shapes[LM_HEAD] = (shape.vocab, shape.hidden)
    return shapes


def padded_vocab(shape: ModelShape, tensor_size: int) -> int:
    """Vocabulary rows over all tensor ranks, padding included."""
    multiple = VOCAB_ROWS_MULTIPLE * tensor_size
    return -(-shape.vocab // multiple) * multiple


def megatron_layout(shape: ModelShape, place: Place, *, fused: bool = False) -> list[ShardLayout]:
    """Every parameter of one rank of `GPTModel`, chunk by chunk in model order.

    fused: names of Transformer Engine's layers with grouped experts instead of the local ones.
    Raises `ValueError` where the cut does not divide the model.
    """
    check_divisible(shape, place)
    layers = shape.num_layers // (place.pipeline_size * place.virtual_size)
    shards: list[ShardLayout] = []
    for chunk in range(place.virtual_size):
        prefix = place.prefix(chunk)
        if place.holds_embedding(chunk):
            name = f"{prefix}embedding.word_embeddings.weight"
            shards.append(_vocab_shard(name, EMBEDDING, shape, place))
        first = (chunk * place.pipeline_size + place.pipeline_rank) * layers
        for local in range(layers):
            ours = f"{prefix}decoder.layers.{local}."
            shards += layer_shards(shape, place, first + local, ours, fused=fused)
        if place.holds_head(chunk):
            name = f"{prefix}decoder.final_layernorm.weight"
            shards.append(whole(name, FINAL_NORM, (shape.hidden,)))
            shards += _head(shape, place, chunk)
    return shards


def _head(shape: ModelShape, place: Place, chunk: int) -> list[ShardLayout]:
    name = f"{place.prefix(chunk)}{OUTPUT_LAYER}"
    if shape.head is HeadKind.scalar:
        return [whole(name, SCORE, (1, shape.hidden))]
    if not shape.tied:
        return [_vocab_shard(name, LM_HEAD, shape, place)]
    if place.holds_embedding(chunk):
        return []
    return [_vocab_shard(name, EMBEDDING, shape, place)]


def _vocab_shard(name: str, hf_name: str, shape: ModelShape, place: Place) -> ShardLayout:
    rows = padded_vocab(shape, place.tensor_size) // place.tensor_size
    start = place.tensor_rank * rows
    valid = max(0, min(shape.vocab - start, rows))
    blocks: tuple[Block, ...] = ()
    if valid:
        hf_rect = Rect((start, 0), (start + valid, shape.hidden))
        blocks = (Block(hf_name, hf_rect, Rect.whole((valid, shape.hidden))),)
    return ShardLayout(name, (rows, shape.hidden), blocks)


def is_expert(name: str) -> bool:
    """Whether a parameter of ours belongs to one expert: cut over expert (and expert-tensor)
    ranks, and held by ranks that are replicas of each other in the expert-data group.
    """
    return ".mlp.experts." in name


def is_replicated(shape: ModelShape, name: str) -> bool:
    """Whether a parameter of ours is the same on every tensor rank (an expert's: on every
    expert-tensor rank), so that it counts once in a norm over them: norms, router, biases of
    row-parallel linears, a scalar head. The answer does not depend on the sizes.
    """
    if name.endswith(OUTPUT_LAYER):
        return shape.head is HeadKind.scalar
    return name.endswith(_WHOLE_SUFFIXES)


def one_replica(ranks: Iterable[Iterable[ShardLayout]]) -> list[ShardLayout]:
    """The shards of several ranks without those whose rectangles an earlier rank holds too.

    What is left covers each element once: replicated norms, experts of other data ranks and
    the tied embedding's second copy are dropped.
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

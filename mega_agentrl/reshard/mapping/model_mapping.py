"""Mapping of Hugging Face names to Megatron-core names, for every supported architecture.

Loading, exporting and sending weights share this mapping. The Megatron side is `GPTModel`, with
layers numbered from 0 in each chunk of a pipeline rank (`ModelParallelRank`). `decoder_layer` maps
the layers; this module maps

    embedding, output_layer  rows split over tensor ranks, padded to a multiple
    scalar head              `score.weight` [1, D] as `output_layer.weight`, replicated
    final norm               replicated
    vision tower             replicated on the tensor ranks of the first stage, in its first chunk,
                             as `vision.NAME`, with Hugging Face's own names inside the tower

With tied embeddings and more than one stage, the last stage holds a second replica of the embedding
as `output_layer.weight`.

The parallel sizes must divide the model:

    tensor           heads, the dense MLP's width, and the rows of q, k and v together; a divisor or
                     a multiple of the key/value heads
    pipeline*virtual layers, or two more (`split_layers`); virtual stages need a pipeline; the first
                     chunk has all layers after which features of images are added (DeepStack)
    expert           experts; expert_tensor: the width of one expert

`config.checks.parallel` checks conditions among the sizes themselves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_agentrl.config.checks.parallel import check_stages, split_layers
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, round_up
from mega_agentrl.reshard.mapping.decoder_layer import layer_hf_shapes, layer_shards
from mega_agentrl.reshard.mapping.lora_layout import is_lora_param, is_lora_replicated
from mega_agentrl.reshard.mapping.model_shape import HeadKind
from mega_agentrl.reshard.mapping.partition import replicate
from mega_agentrl.reshard.mapping.vision_shape import vision_tensor_shapes

if TYPE_CHECKING:
    from mega_agentrl.reshard.mapping.model_shape import ModelShape
    from mega_agentrl.reshard.mapping.partition import ModelParallelRank


VOCAB_ROWS_MULTIPLE = 8
"""Rows of a vocabulary shard are a multiple of this, which bf16 tensor cores prefer."""

HF_EMBEDDING = "model.embed_tokens.weight"
"""Name in the checkpoint of a text model; `hf_embedding` gives that of any model."""
HF_LM_HEAD = "lm_head.weight"
HF_SCORE_HEAD = "score.weight"
HF_FINAL_NORM = "model.norm.weight"
"""Name in the checkpoint of a text model; `hf_final_norm` gives that of any model."""
MEGATRON_OUTPUT_LAYER = "output_layer.weight"
MEGATRON_VISION_PREFIX = "vision."
"""First part of the names of the vision tower's parameters, after that of a chunk."""

_REPLICATED_SUFFIXES = (
    "norm.weight", "layer_norm_weight", "router.weight", "linear_proj.bias", "linear_fc2.bias"
)  # fmt: skip
_VISION_NAME = re.compile(rf"(chunk\d+\.)?{re.escape(MEGATRON_VISION_PREFIX)}")


def hf_embedding(shape: ModelShape) -> str:
    """Return the Hugging Face name of the embedding."""
    return f"{shape.family.hf_decoder_prefix}embed_tokens.weight"


def hf_final_norm(shape: ModelShape) -> str:
    """Return the Hugging Face name of the final norm."""
    return f"{shape.family.hf_decoder_prefix}norm.weight"


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor of the Hugging Face checkpoint, in model order."""
    shapes: dict[str, tuple[int, ...]] = {
        hf_embedding(shape): (shape.vocab_size, shape.hidden_size)
    }
    for layer in range(shape.num_layers):
        shapes |= layer_hf_shapes(shape, layer)
    shapes[hf_final_norm(shape)] = (shape.hidden_size,)
    if shape.head is HeadKind.scalar:
        shapes[HF_SCORE_HEAD] = (1, shape.hidden_size)
    elif not shape.tie_word_embeddings:
        shapes[HF_LM_HEAD] = (shape.vocab_size, shape.hidden_size)
    if shape.vision is not None:
        prefix = shape.family.hf_vision_prefix
        tensors = vision_tensor_shapes(shape.vision)
        shapes |= {f"{prefix}{name}": full_shape for name, full_shape in tensors.items()}
    return shapes


def padded_vocab_size(shape: ModelShape, tensor_size: int) -> int:
    """Return the vocabulary rows over all tensor ranks, including padding."""
    return round_up(shape.vocab_size, VOCAB_ROWS_MULTIPLE * tensor_size)


def megatron_layout(
    shape: ModelShape, parallel_rank: ModelParallelRank, *, fused: bool = False
) -> list[ShardLayout]:
    """Return every parameter of one rank of `GPTModel`, chunk by chunk in model order.

    Args:
        shape: The model.
        parallel_rank: The rank.
        fused: Use the names of Transformer Engine's layers with grouped experts instead of the
            names of the local layers.

    Raises:
        ValueError: If the parallel sizes do not divide the model.
    """
    check_divisible(shape, parallel_rank)
    shards: list[ShardLayout] = []
    for chunk in range(parallel_rank.virtual_size):
        prefix = parallel_rank.param_prefix(chunk)
        if parallel_rank.holds_embedding(chunk):
            name = f"{prefix}embedding.word_embeddings.weight"
            shards.append(_vocab_shard(name, hf_embedding(shape), shape, parallel_rank))
        for local, layer in enumerate(parallel_rank.layers(chunk, shape.num_layers)):
            megatron_prefix = f"{prefix}decoder.layers.{local}."
            shards += layer_shards(shape, parallel_rank, layer, megatron_prefix, fused=fused)
        if parallel_rank.holds_output_layer(chunk):
            name = f"{prefix}decoder.final_layernorm.weight"
            shards.append(replicate(name, hf_final_norm(shape), (shape.hidden_size,)))
            shards += _output_layer_shards(shape, parallel_rank, chunk)
        if parallel_rank.holds_embedding(chunk):
            shards += _vision_shards(shape, prefix)
    return shards


def _output_layer_shards(
    shape: ModelShape, parallel_rank: ModelParallelRank, chunk: int
) -> list[ShardLayout]:
    name = f"{parallel_rank.param_prefix(chunk)}{MEGATRON_OUTPUT_LAYER}"
    if shape.head is HeadKind.scalar:
        return [replicate(name, HF_SCORE_HEAD, (1, shape.hidden_size))]
    if not shape.tie_word_embeddings:
        return [_vocab_shard(name, HF_LM_HEAD, shape, parallel_rank)]
    if parallel_rank.holds_embedding(chunk):
        return []
    return [_vocab_shard(name, hf_embedding(shape), shape, parallel_rank)]


def _vision_shards(shape: ModelShape, prefix: str) -> list[ShardLayout]:
    if shape.vision is None:
        return []
    hf_prefix = shape.family.hf_vision_prefix
    return [
        replicate(f"{prefix}{MEGATRON_VISION_PREFIX}{name}", f"{hf_prefix}{name}", full_shape)
        for name, full_shape in vision_tensor_shapes(shape.vision).items()
    ]


def _vocab_shard(
    name: str, hf_name: str, shape: ModelShape, parallel_rank: ModelParallelRank
) -> ShardLayout:
    rows = padded_vocab_size(shape, parallel_rank.tensor_size) // parallel_rank.tensor_size
    start = parallel_rank.tensor_rank * rows
    valid = max(0, min(shape.vocab_size - start, rows))
    blocks: tuple[Block, ...] = ()
    if valid:
        hf_rect = Rect((start, 0), (start + valid, shape.hidden_size))
        blocks = (Block(hf_name, hf_rect, Rect.whole((valid, shape.hidden_size))),)
    return ShardLayout(name, (rows, shape.hidden_size), blocks)


def is_expert_param(name: str) -> bool:
    """Return whether a Megatron parameter belongs to one expert.

    Such parameters are distributed over expert and expert-tensor ranks, and their replicas form the
    expert-data group.
    """
    return ".mlp.experts." in name


def is_vision_param(name: str) -> bool:
    """Return whether a Megatron parameter belongs to the vision tower."""
    return _VISION_NAME.match(name) is not None


def is_hf_vision_name(shape: ModelShape, hf_name: str) -> bool:
    """Return whether a Hugging Face tensor belongs to the vision tower."""
    return shape.vision is not None and hf_name.startswith(shape.family.hf_vision_prefix)


def is_tensor_replicated(shape: ModelShape, name: str) -> bool:
    """Return whether a Megatron parameter is the same on every tensor rank.

    It then counts once in a norm over these ranks (for an expert's parameter: the expert-tensor
    ranks). This holds for norms, router, biases of row-parallel linears, a scalar head, the
    vision tower and one of the factors of each adapter.
    """
    if is_vision_param(name):
        return True
    if is_lora_param(name):
        return is_lora_replicated(name)
    if name.endswith(MEGATRON_OUTPUT_LAYER):
        return shape.head is HeadKind.scalar
    return name.endswith(_REPLICATED_SUFFIXES)


_WRONG_SIZE_CAUSE = "probable cause: a size chosen for another model"


def check_divisible(shape: ModelShape, parallel_rank: ModelParallelRank) -> None:
    """Raise a `ValueError` naming the first dimension of the model that a size does not divide."""
    tensor = parallel_rank.tensor_size
    _check_divides("parallel.tensor", tensor, "num_attention_heads", shape.num_heads)
    _check_kv_heads(shape, tensor)
    if not shape.moe or not all(shape.moe.moe_layer_pattern):
        _check_divides("parallel.tensor", tensor, "intermediate_size", shape.ffn_hidden_size)
    if parallel_rank.virtual_size > 1 and parallel_rank.pipeline_size == 1:
        raise ConfigError(
            "parallel.virtual_pipeline",
            parallel_rank.virtual_size,
            "1 with parallel.pipeline=1",
            "parallel.pipeline was removed alone",
        )
    check_stages(
        "parallel.pipeline * parallel.virtual_pipeline",
        parallel_rank.pipeline_size * parallel_rank.virtual_size,
        shape.num_layers,
    )
    _check_deepstack_layers(shape, parallel_rank)
    if shape.moe:
        _check_divides(
            "parallel.expert", parallel_rank.expert_size, "num_experts", shape.moe.num_experts
        )
        _check_divides(
            "parallel.expert_tensor",
            parallel_rank.expert_tensor_size,
            "moe_intermediate_size",
            shape.moe.ffn_hidden_size,
        )
    elif parallel_rank.expert_size > 1:
        expected = "1, as the model has no experts"
        raise ConfigError("parallel.expert", parallel_rank.expert_size, expected, _WRONG_SIZE_CAUSE)


def _check_deepstack_layers(shape: ModelShape, parallel_rank: ModelParallelRank) -> None:
    stages = parallel_rank.pipeline_size * parallel_rank.virtual_size
    num_features = len(shape.vision.deepstack_blocks) if shape.vision else 0
    if stages > 1 and len(split_layers(shape.num_layers, stages)[0]) < num_features:
        raise ConfigError(
            "parallel.pipeline * parallel.virtual_pipeline",
            stages,
            f"stages of at least {num_features} layers, after which the first stage adds features "
            f"of images, of the model's {shape.num_layers}",
            "a layout of a text model",
        )


def _check_kv_heads(shape: ModelShape, tensor: int) -> None:
    heads = shape.num_kv_heads
    if heads % tensor and tensor % heads:
        expected = f"a divisor or a multiple of the model's num_key_value_heads, {heads}"
        raise ConfigError("parallel.tensor", tensor, expected, _WRONG_SIZE_CAUSE)
    rows = (shape.num_heads + 2 * heads) * shape.head_dim
    _check_divides("parallel.tensor", tensor, "rows of q, k and v", rows)


def _check_divides(key: str, size: int, dimension: str, extent: int) -> None:
    if extent % size:
        expected = f"a divisor of the model's {dimension}, {extent}"
        raise ConfigError(key, size, expected, _WRONG_SIZE_CAUSE)

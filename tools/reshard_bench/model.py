"""The model of the benchmark: a Qwen3 folder of given sizes without weights, and its shards.

A value depends only on its tensor and position, so that every rank can make its own shards. Besides
them, a process holds at most one whole tensor.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.reshard.layout import ShardLayout

TENSOR, PIPELINE = 2, 2
"""Parallel sizes of the trainer; tensor ranks come first."""
_SCALE = 0.02


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model, named as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


def write_folder(folder: Path, sizes: ModelSizes) -> None:
    """Write the files that vLLM needs: config.json and a tokenizer with one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(
        **asdict(sizes),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    words = {word: number for number, word in enumerate(("<pad>", "<unk>", "<eos>"))}
    words |= {f"w{number}": number for number in range(len(words), sizes.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)


def trainer_layouts(shape: ModelShape) -> list[list[ShardLayout]]:
    """Return the layouts of all trainer ranks."""
    return [
        megatron_layout(
            shape,
            ModelParallelRank(
                tensor_rank=rank % TENSOR,
                tensor_size=TENSOR,
                pipeline_rank=rank // TENSOR,
                pipeline_size=PIPELINE,
            ),
        )
        for rank in range(TENSOR * PIPELINE)
    ]


def num_params(shape: ModelShape) -> int:
    """Return the number of elements of the model."""
    return sum(torch.Size(sides).numel() for sides in hf_shapes(shape).values())


def make_shards(shape: ModelShape, layout: Sequence[ShardLayout]) -> dict[str, torch.Tensor]:
    """Return the float32 shards of one rank by parameter name; padding is zero."""
    shards = {shard.name: torch.zeros(shard.shape) for shard in layout}
    blocks = [(block, shard.name) for shard in layout for block in shard.blocks]
    for name in dict.fromkeys(block.hf_name for block, _ in blocks):
        sides = hf_shapes(shape)[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(sides).uniform_(-1.0, 1.0, generator=generator)
        values = values.mul_(_SCALE) if len(sides) > 1 else values.mul_(0.1).add_(1.0)
        for block, param in blocks:
            if block.hf_name == name:
                block_values = values[block.hf_rect.slices].reshape(block.local_rect.shape)
                shards[param][block.local_rect.slices] = block_values
    return shards

"""Writes the folder of a generated task: data in the RL format, demonstrations and a tiny model.

The writer creates `train.parquet`, `dev.parquet`, `validation.parquet`, `demonstrations.parquet`,
`model/` (a small random Qwen3, Qwen3-MoE or Qwen2.5-VL, with its tokenizer), and finally the stamp
(`settings`). A task writes its further files before that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from mega_agentrl.data.generated.settings import TaskSettings, remove_stamp, write_stamp
from mega_agentrl.data.generated.tokenizer import TaskVocabulary, train_tokenizer
from mega_agentrl.data.generated.vision_model import make_vision_model, write_preprocessor_config
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from mega_agentrl.data.generated.entity_splits import Split

NUM_TOKENIZER_DIALOGUES = 2000
HEAD_DIM = 32
EXPERTS_PER_TOKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContent:
    """The data of a task."""

    rows: Mapping[Split, Sequence[dict[str, Any]]]
    """Rows in the RL format by split."""
    demonstrations: Sequence[dict[str, Any]]
    """Rows with `messages`, and `tools` where the chat template shows functions."""
    vocabulary: TaskVocabulary
    """Texts that the tokenizer keeps whole."""


def open_task_folder(folder: Path) -> None:
    """Create the folder, or mark it as incomplete and remove its model."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_stamp(folder)
    shutil.rmtree(folder / "model", ignore_errors=True)


def write_task_folder(folder: Path, settings: TaskSettings, content: TaskContent) -> None:
    """Write data and model into an opened folder; equal settings give equal bytes."""
    for split, rows in content.rows.items():
        _write_parquet(rows, folder / f"{split}.parquet")
    _write_parquet(content.demonstrations, folder / "demonstrations.parquet")
    dialogues = [row["messages"] for row in content.demonstrations[:NUM_TOKENIZER_DIALOGUES]]
    tokenizer = train_tokenizer(dialogues, content.vocabulary, vocab_size=settings.vocab_size)
    write_model(
        folder / "model",
        tokenizer,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_experts=settings.num_experts,
        seed=settings.seed,
        has_images=content.vocabulary.has_images,
    )
    write_stamp(folder, settings)


def _write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def write_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int,
    hidden_size: int,
    seed: int,
    num_experts: int = 0,
    has_images: bool = False,
) -> None:
    """Write a tiny model with random weights: config, weights, tokenizer and chat template.

    It is a Qwen3, with experts a Qwen3-MoE, or with images a Qwen2.5-VL.

    Raises:
        ValueError: `hidden_size` does not give an even number of heads.
    """
    num_heads, rest = divmod(hidden_size, HEAD_DIM)
    if rest or num_heads % 2:
        expected = f"a multiple of {2 * HEAD_DIM}"
        cause = f"heads are {HEAD_DIM} wide and two share a key-value head"
        raise InputError("hidden_size", hidden_size, expected, cause)
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "initializer_range": hidden_size**-0.5 / 2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if has_images:
            model = make_vision_model(text_config, tokenizer)
        elif num_experts:
            experts = {"num_experts": num_experts, "num_experts_per_tok": EXPERTS_PER_TOKEN}
            experts |= {"moe_intermediate_size": hidden_size // 2, "norm_topk_prob": True}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**text_config, **experts))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**text_config))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if has_images:
        write_preprocessor_config(folder)

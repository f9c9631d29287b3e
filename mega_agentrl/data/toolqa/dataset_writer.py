"""Writes all input of the smoke run into one folder.

`model/` (a small random Qwen3 with its tokenizer), `train.parquet`, `dev.parquet` and
`validation.parquet` in the RL format, `demonstrations.parquet`, `corpus.jsonl`, and finally the
stamp (`settings`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from mega_agentrl.data.toolqa.demonstrations import make_demonstrations
from mega_agentrl.data.toolqa.entity_splits import Split, SplitInventory, make_split_inventories
from mega_agentrl.data.toolqa.questions import (
    Fact,
    Question,
    make_facts,
    make_questions,
    write_corpus,
)
from mega_agentrl.data.toolqa.settings import ToolQASettings, remove_stamp, write_stamp
from mega_agentrl.data.toolqa.tokenizer import train_tokenizer

TOOLS = ("python", "search")
NUM_TOKENIZER_DIALOGUES = 2000
HEAD_DIM = 32


def write_toolqa_dataset(folder: Path, settings: ToolQASettings) -> None:
    """Write the folder, replacing its files; equal settings give equal bytes.

    Raises:
        ValueError: the settings ask for more questions than exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_stamp(folder)
    shutil.rmtree(folder / "model", ignore_errors=True)
    inventories = make_split_inventories(settings.seed)
    facts = make_facts(inventories, settings.seed)
    write_corpus(facts, folder / "corpus.jsonl")
    questions = _make_split_questions(settings, inventories, facts)
    for split in Split:
        rows = [make_toolqa_row(question, i, split) for i, question in enumerate(questions[split])]
        _write_parquet(rows, folder / f"{split}.parquet")
    demonstrations = make_demonstrations(
        questions[Split.train],
        num_demonstrations=settings.num_demonstrations,
        seed=settings.seed,
    )
    rows = [{"messages": messages} for messages in demonstrations]
    _write_parquet(rows, folder / "demonstrations.parquet")
    tokenizer = train_tokenizer(
        demonstrations[:NUM_TOKENIZER_DIALOGUES], vocab_size=settings.vocab_size
    )
    write_model(
        folder / "model",
        tokenizer,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        seed=settings.seed,
    )
    write_stamp(folder, settings)


def make_toolqa_row(question: Question, index: int, split: Split) -> dict[str, Any]:
    """Return a question as a row of the RL format, which offers both tools."""
    return {
        "data_source": question.data_source,
        "prompt": [{"role": "user", "content": question.text}],
        "ability": "tool_use",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {
            "split": str(split),
            "index": index,
            "tools_kwargs": {tool: {"create_kwargs": None} for tool in TOOLS},
        },
    }


def _make_split_questions(
    settings: ToolQASettings,
    inventories: Mapping[Split, SplitInventory],
    facts: Mapping[tuple[str, str], Fact],
) -> dict[Split, list[Question]]:
    sizes = {
        Split.train: settings.num_train,
        Split.dev: settings.num_dev,
        Split.validation: settings.num_validation,
    }
    return {
        split: make_questions(
            split, inventories[split], facts, num_questions=size, seed=settings.seed
        )
        for split, size in sizes.items()
    }


def _write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def write_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int,
    hidden_size: int,
    seed: int,
) -> None:
    """Write a tiny Qwen3 with random weights: config, weights, tokenizer and chat template.

    Raises:
        ValueError: `hidden_size` does not give an even number of heads.
    """
    num_heads, rest = divmod(hidden_size, HEAD_DIM)
    if rest or num_heads % 2:
        raise ValueError(
            f"hidden_size={hidden_size}: expected a multiple of {2 * HEAD_DIM}, because heads are "
            f"{HEAD_DIM} wide and two share a key-value head"
        )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=hidden_size**-0.5 / 2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

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

from mega_agentrl.data.toolqa.demonstrations import make_demonstrations
from mega_agentrl.data.toolqa.entity_splits import Split, SplitInventory, make_split_inventories
from mega_agentrl.data.toolqa.knowledge_base import Fact, make_facts, write_corpus
from mega_agentrl.data.toolqa.questions import Question, make_questions
from mega_agentrl.data.toolqa.settings import ToolQASettings, remove_stamp, write_stamp
from mega_agentrl.data.toolqa.tiny_model import write_model
from mega_agentrl.data.toolqa.tokenizer import train_tokenizer

TOOLS = ("python", "search")
NUM_TOKENIZER_DIALOGUES = 2000


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

"""Writes all input of the smoke run into one folder.

Besides the files of every generated task (`task_folder`), the folder gets `corpus.jsonl` with the
facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mega_agentrl.data.generated.entity_splits import Split, SplitInventory, make_split_inventories
from mega_agentrl.data.generated.settings import GeneratedTask, TaskSettings
from mega_agentrl.data.generated.task_folder import (
    TaskContent,
    open_task_folder,
    write_task_folder,
)
from mega_agentrl.data.toolqa.chat_demonstrations import CHAT_VOCABULARY, SHOWN_TOOLS
from mega_agentrl.data.toolqa.demonstrations import VOCABULARY, make_demonstrations
from mega_agentrl.data.toolqa.questions import (
    Fact,
    Question,
    make_facts,
    make_questions,
    write_corpus,
)

TOOLS = ("python", "search")


def write_toolqa_dataset(folder: Path, settings: TaskSettings) -> None:
    """Write the folder of `toolqa` or `toolqa_chat`; equal settings give equal bytes.

    Raises:
        ValueError: the settings ask for more questions than exist.
    """
    inventories = make_split_inventories(settings.seed)
    facts = make_facts(inventories, settings.seed)
    questions = _make_split_questions(settings, inventories, facts)
    in_chat = settings.task is GeneratedTask.toolqa_chat
    demonstrations = make_demonstrations(
        questions[Split.train],
        num_demonstrations=settings.num_demonstrations,
        seed=settings.seed,
        in_chat=in_chat,
    )
    shown_tools = {"tools": SHOWN_TOOLS} if in_chat else {}
    content = TaskContent(
        rows={
            split: [
                make_toolqa_row(question, i, split) for i, question in enumerate(questions[split])
            ]
            for split in Split
        },
        demonstrations=[{"messages": messages, **shown_tools} for messages in demonstrations],
        vocabulary=CHAT_VOCABULARY if in_chat else VOCABULARY,
    )
    open_task_folder(folder)
    write_corpus(facts, folder / "corpus.jsonl")
    write_task_folder(folder, settings, content)


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
    settings: TaskSettings,
    inventories: Mapping[Split, SplitInventory],
    facts: Mapping[tuple[str, str], Fact],
) -> dict[Split, list[Question]]:
    return {
        split: make_questions(
            split, inventories[split], facts, num_questions=size, seed=settings.seed
        )
        for split, size in settings.split_sizes.items()
    }

"""Sizes of a generated task, and the stamp that marks a complete folder.

The stamp is written last and holds the settings and a format version; a folder with the same stamp
is up to date. This module imports nothing heavy, so that the check is instant.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mega_agentrl.data.generated.entity_splits import Split
from mega_agentrl.errors import InputError

FORMAT_VERSION = 2
STAMP_FILE = "stamp.json"


class GeneratedTask(StrEnum):
    """Tasks that can be generated."""

    toolqa = "toolqa"
    """Questions that need a calculator, a search, or both (`data.toolqa`)."""
    toolqa_chat = "toolqa_chat"
    """The same questions, with calls as messages of a chat (`data.toolqa.chat_demonstrations`)."""
    calls = "calls"
    """Requests that need one function call, several, or none (`data.calls`)."""
    orders = "orders"
    """A game: questions to a simulated customer, then an order (`data.orders`)."""
    vision = "vision"
    """Questions about pictures, with a tool that zooms in (`data.vision_qa`)."""

    @property
    def output_files(self) -> tuple[str, ...]:
        """Files of the task's folder, without the stamp."""
        task_files = {
            GeneratedTask.toolqa: ("corpus.jsonl",),
            GeneratedTask.toolqa_chat: ("corpus.jsonl",),
            GeneratedTask.calls: (),
            GeneratedTask.orders: ("interaction.yaml",),
            GeneratedTask.vision: ("model/preprocessor_config.json",),
        }
        return (
            *task_files[self],
            "demonstrations.parquet",
            "dev.parquet",
            "train.parquet",
            "validation.parquet",
            "model/config.json",
            "model/model.safetensors",
            "model/tokenizer.json",
        )


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Seed and sizes of the data set and the model."""

    task: GeneratedTask = GeneratedTask.toolqa
    """The task to generate."""
    seed: int = 0
    """Seed of all random choices."""
    num_train: int = 3000
    """Number of training questions."""
    num_dev: int = 300
    """Number of development questions."""
    num_validation: int = 300
    num_demonstrations: int = 16000
    vocab_size: int = 448
    """Maximum number of tokens."""
    num_layers: int = 2
    hidden_size: int = 128
    num_experts: int = 0
    """Experts of each layer, of which a token uses two; 0 for a dense model."""
    blank_images: bool = False
    """Whether the pictures of the task `vision` show nothing, to test that runs read pictures."""

    @property
    def split_sizes(self) -> dict[Split, int]:
        """Number of questions of each split."""
        return {
            Split.train: self.num_train,
            Split.dev: self.num_dev,
            Split.validation: self.num_validation,
        }

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("task", "seed", "blank_images", "num_experts") and value < 1:
                raise InputError(name, value, "at least 1")
        if self.num_experts and (self.num_experts < 4 or self.task is GeneratedTask.vision):
            expected = f"0, or at least 4 with another task than vision; the task is {self.task}"
            raise InputError("num_experts", self.num_experts, expected)
        if self.blank_images and self.task is not GeneratedTask.vision:
            expected = f"False, because the task {self.task} has no images"
            raise InputError("blank_images", self.blank_images, expected)


def is_written(folder: Path, settings: TaskSettings) -> bool:
    """Return whether the folder was written completely with these settings."""
    path = folder / STAMP_FILE
    files = settings.task.output_files
    if not path.is_file() or not all((folder / name).is_file() for name in files):
        return False
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return False
    return bool(stamp == _stamp_content(settings))


def write_stamp(folder: Path, settings: TaskSettings) -> None:
    """Mark the folder as complete; call this last."""
    text = json.dumps(_stamp_content(settings), indent=2) + "\n"
    (folder / STAMP_FILE).write_text(text, encoding="utf-8")


def remove_stamp(folder: Path) -> None:
    """Mark the folder as incomplete; call this before rewriting it."""
    (folder / STAMP_FILE).unlink(missing_ok=True)


def _stamp_content(settings: TaskSettings) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **asdict(settings)}

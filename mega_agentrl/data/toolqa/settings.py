"""How big the tool-QA folder is, and the stamp that says it has been written.

The stamp is written last and holds the settings and a format version: with the same settings
there is nothing to do. Imports nothing heavy, so that finding this out is instant.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
STAMP = "stamp.json"
OUTPUTS = (
    "corpus.jsonl",
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
    """seed: of everything. num_*: questions of each split, and demonstrations.

    vocab_size: upper bound. num_layers, hidden_size: of the model.
    """

    seed: int = 0
    num_train: int = 3000
    num_dev: int = 300
    num_validation: int = 300
    num_demonstrations: int = 16000
    vocab_size: int = 448
    num_layers: int = 2
    hidden_size: int = 128

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")


def is_written(folder: Path, settings: TaskSettings) -> bool:
    """True when the folder was written completely with these settings."""
    path = folder / STAMP
    if not path.is_file() or not all((folder / name).is_file() for name in OUTPUTS):
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return False
    return bool(found == _stamp(settings))


def write_stamp(folder: Path, settings: TaskSettings) -> None:
    """Say that everything is there; the last thing to write."""
    text = json.dumps(_stamp(settings), indent=2) + "\n"
    (folder / STAMP).write_text(text, encoding="utf-8")


def remove_stamp(folder: Path) -> None:
    """Say that the folder is being rewritten; the first thing to do."""
    (folder / STAMP).unlink(missing_ok=True)


def _stamp(settings: TaskSettings) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **asdict(settings)}

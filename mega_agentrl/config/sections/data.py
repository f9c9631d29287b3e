"""Settings of the training and validation prompts (`data.*`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mega_agentrl.config.enums import PromptOrder, Truncation
from mega_agentrl.config.sections.data_files import parse_data_files
from mega_agentrl.config.sections.ranges import check_range

_CLASS_PATH_RE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass
class DataConfig:
    """Sources of the prompts, their processing and their order."""

    train: Any = ""
    """Training files in the RL format, one or a list, optionally with weights:
    `data.train=[a.parquet,b.jsonl@0.5]`. Parquet, JSONL and JSONL.gz; local paths or fsspec URLs
    (`s3://`, `gs://`, `hf://`, `https://`, ...), which are downloaded to a local cache."""
    validation: Any = ""
    """Validation files, as `data.train` but without weights."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or a string that becomes one user message."""
    reward_fn_key: str = "data_source"
    """Column of the data source, which selects the prompt's reward."""
    prompt_template: str = ""
    """Jinja file that renders the last user message of each prompt; empty for none."""
    dataset_class: str = ""
    """User class `package.module:Class` that provides the rows instead of the files; empty for
    none."""
    prompts_per_step: int = 32
    """Prompts per RL step."""
    max_prompt_tokens: int = 1024
    """Maximum length of a prompt."""
    truncation: Truncation = Truncation.error
    """Treatment of longer prompts."""
    order: PromptOrder = PromptOrder.shuffled
    """Order of the training prompts."""

    def __post_init__(self) -> None:
        for key in ("prompts_per_step", "max_prompt_tokens"):
            check_range(getattr(self, key) >= 1, f"data.{key}", getattr(self, key), "at least 1")
        for key in ("prompt_key", "reward_fn_key"):
            column = getattr(self, key)
            check_range(bool(column.strip()), f"data.{key}", repr(column), "the name of a column")
        check_range(
            not self.dataset_class or _CLASS_PATH_RE.fullmatch(self.dataset_class) is not None,
            "data.dataset_class",
            self.dataset_class,
            "package.module:Class, or empty for the built-in dataset",
        )
        train = parse_data_files(self.train, "data.train")
        weighted = any(file.weight != 1 for file in train)
        check_range(
            not (weighted and self.dataset_class),
            "data.train",
            self.train,
            "no weights with data.dataset_class, which does not tell the file of a row",
        )
        held_out = parse_data_files(self.validation, "data.validation")
        check_range(
            all(file.weight == 1 for file in held_out),
            "data.validation",
            self.validation,
            "no weights: every validation question is asked once",
        )

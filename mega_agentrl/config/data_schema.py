"""Settings of the prompts (`data.*`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mega_agentrl.config.choices import PromptOrder, Truncation
from mega_agentrl.config.data_files import data_files
from mega_agentrl.config.ranges import require

_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass
class DataConfig:
    """Where prompts come from, what becomes of them, and in what order they come.

    train, validation: files in the RL format, one or a list, each with a weight where it is not
    1: `data.train=[a.parquet,b.jsonl@0.5]`, see `config.data_files`. Parquet, JSONL and JSONL.gz;
    paths of this machine or URLs of fsspec (`s3://`, `gs://`, `hf://`, `https://`, ...), which
    are kept in a local cache, see `data.remote`. Weights are for training only.

    prompt_key: column of the prompt, chat messages or a text, which is one user message.
    reward_fn_key: column that says by which rubric a prompt is rewarded. template: Jinja file
    put around the last user message of each prompt, see `data.prompt_template`; empty for none.
    dataset_class: `package.module:Class` that gives the rows instead of the files, see
    `data.own_dataset`; empty for none.

    max_prompt_tokens and truncation: longer prompts are an error, or counted and dropped or cut,
    see `data.truncate`. order: see `PromptOrder`.
    """

    train: Any = ""
    validation: Any = ""
    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    template: str = ""
    dataset_class: str = ""
    prompts_per_step: int = 32
    max_prompt_tokens: int = 1024
    truncation: Truncation = Truncation.error
    order: PromptOrder = PromptOrder.shuffled

    def __post_init__(self) -> None:
        for key in ("prompts_per_step", "max_prompt_tokens"):
            require(getattr(self, key) >= 1, f"data.{key}", getattr(self, key), "at least 1")
        for key in ("prompt_key", "reward_fn_key"):
            column = getattr(self, key)
            require(bool(column.strip()), f"data.{key}", repr(column), "the name of a column")
        require(
            not self.dataset_class or _CLASS.fullmatch(self.dataset_class) is not None,
            "data.dataset_class",
            self.dataset_class,
            "package.module:Class, or nothing for the built-in one",
        )
        train = data_files(self.train, "data.train")
        weighted = any(file.weight != 1 for file in train)
        require(
            not (weighted and self.dataset_class),
            "data.train",
            self.train,
            "no weights with data.dataset_class, which does not say what file a row is of",
        )
        held_out = data_files(self.validation, "data.validation")
        require(
            all(file.weight == 1 for file in held_out),
            "data.validation",
            self.validation,
            "no weights: every question of it is asked once",
        )

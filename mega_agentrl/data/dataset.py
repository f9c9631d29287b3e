"""RL datasets: parquet files in the usual RL format, read into `Prompt` records.

Columns: `prompt` (chat messages), `data_source`, `reward_model` (struct with
`ground_truth`: a string or a list of strings), and optionally `extra_info` (struct with
`index`, `tools_kwargs`, `need_tools_kwargs` and `interaction_kwargs`). The keys of
`tools_kwargs` choose the prompt's tools; without any it gets all of them, with a warning where
`need_tools_kwargs` is set. The prompt id is `data_source/index`, with the row number where there
is no index.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mega_agentrl.config.choices import Overlong
from mega_agentrl.data.table import read_rows, without_nulls
from mega_agentrl.types.records import Message, Prompt

_log = logging.getLogger(__name__)


class ChatEncoder(Protocol):
    """Turns chat messages into prompt ids."""

    def apply_chat(
        self, messages: tuple[Message, ...], tools: list[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the conversation followed by the generation prompt."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """What a file gave. num_dropped: prompts left out because they were too long."""

    prompts: tuple[Prompt, ...]
    num_dropped: int


def load_prompts(
    path: str | Path,
    codec: ChatEncoder,
    *,
    key: str,
    max_prompt_tokens: int,
    overlong: Overlong,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> PromptSet:
    """Read, tokenize and check a dataset; `key` is the setting that named it.

    tool_schemas: by tool name; those of a prompt's tools are rendered by the chat template.
    Raises ValueError, see `read_rows`, and for a malformed row, two rows with one id, a prompt
    that is too long under `Overlong.error`, and when nothing is left.
    """
    rows = read_rows(path, key=key, columns=("prompt", "data_source", "reward_model"))
    prompts: dict[str, Prompt] = {}
    num_long, longest = 0, 0
    for number, row in enumerate(rows):
        prompt = _prompt(row, number, codec, tool_schemas or {}, f"{key}={path} row {number}")
        if prompt.extra_info.get("need_tools_kwargs") and not prompt.tools_kwargs:
            _log.warning(
                "%s row %d: no tools_kwargs, expected some; index %s, data source %s",
                *(key, number, prompt.extra_info.get("index", number), prompt.data_source),
            )
        if prompt.prompt_id in prompts:
            raise ValueError(
                f"{key}={path} row {number}: id {prompt.prompt_id} occurs twice, expected "
                "extra_info.index to be unique within a data_source"
            )
        longest = max(longest, len(prompt.token_ids))
        if len(prompt.token_ids) > max_prompt_tokens:
            num_long += 1
        else:
            prompts[prompt.prompt_id] = prompt
    if num_long and (overlong is Overlong.error or not prompts):
        raise ValueError(
            f"{key}={path}: {num_long} of {len(rows)} prompts are longer than "
            f"data.max_prompt_tokens={max_prompt_tokens} (the longest has {longest} tokens); "
            + ("raise it" if not prompts else "raise it, or set data.overlong=drop")
        )
    return PromptSet(prompts=tuple(prompts.values()), num_dropped=num_long)


def _prompt(
    row: Mapping[str, Any],
    number: int,
    codec: ChatEncoder,
    tool_schemas: Mapping[str, Mapping[str, Any]],
    where: str,
) -> Prompt:
    messages = check_messages(row["prompt"], f"{where}, column prompt")
    source = row["data_source"]
    if not isinstance(source, str):
        raise ValueError(f"{where}, column data_source: got {source!r}, expected a string")  # noqa: TRY004
    extra = without_nulls(row.get("extra_info") or {})
    tools_kwargs = extra.pop("tools_kwargs", {})
    chosen = [name for name, kwargs in tools_kwargs.items() if kwargs is not None]
    tools = [tool_schemas[name] for name in chosen or tool_schemas if name in tool_schemas]
    return Prompt(
        prompt_id=f"{source}/{extra.get('index', number)}",
        data_source=source,
        messages=messages,
        ground_truth=_ground_truth(row["reward_model"], where),
        token_ids=tuple(codec.apply_chat(messages, tools or None)),
        tools_kwargs=tools_kwargs,
        tool_schemas=tuple(tools),
        extra_info=extra,
    )


def check_messages(value: Any, where: str) -> tuple[Message, ...]:
    """The chat messages of a cell; ValueError names the place when it is anything else."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: got {value!r}, expected a non-empty list of chat messages")
    messages = without_nulls(value)
    for message in messages:
        parts = message if isinstance(message, dict) else {}
        if not all(isinstance(parts.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"{where}: got message {message!r}, expected string members role and content"
            )
    return tuple(messages)


def _ground_truth(cell: Any, where: str) -> str | tuple[str, ...]:
    truth = cell.get("ground_truth") if isinstance(cell, dict) else None
    if isinstance(truth, str):
        return truth
    if isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        return tuple(truth)
    raise ValueError(
        f"{where}, column reward_model: got {cell!r}, expected a struct whose ground_truth is a "
        "string or a non-empty list of strings"
    )

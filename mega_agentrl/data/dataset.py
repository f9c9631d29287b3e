"""RL datasets: rows of files, or of a class of one's own, read into `Prompt` records.

Columns: `data.prompt_key` (`prompt`: chat messages, or a text, which is one user message),
`data.reward_fn_key` (`data_source`), `reward_model` (struct with `ground_truth`: a string or a
list of strings), and optionally `extra_info` (struct with `index`, `tools_kwargs`,
`need_tools_kwargs` and `interaction_kwargs`). The keys of `tools_kwargs` choose the prompt's
tools; without any it gets all of them, with a warning where `need_tools_kwargs` is set. The
prompt id is `data_source/index`, with the row's number, over all files, where there is no index.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import Truncation
from mega_agentrl.config.data_files import DataFile
from mega_agentrl.data.encode import ChatEncoder, encode_all
from mega_agentrl.data.own_dataset import dataset_class, own_rows
from mega_agentrl.data.prompt_template import PromptTemplate
from mega_agentrl.data.remote import local_copy
from mega_agentrl.data.table import check_columns, read_rows, without_nulls
from mega_agentrl.data.truncate import cut, num_behind
from mega_agentrl.types.records import Message, Prompt

if TYPE_CHECKING:
    from mega_agentrl.config.data_schema import DataConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """What the files gave. weights: of each prompt's file. num_dropped, num_cut: prompts that were
    too long and are left out, or cut."""

    prompts: tuple[Prompt, ...]
    weights: tuple[float, ...]
    num_dropped: int = 0
    num_cut: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """A row, where it is from, and the weight of its file. number: over all files."""

    values: Mapping[str, Any]
    where: str
    number: int
    weight: float


@dataclass(frozen=True, slots=True)
class UnencodedPrompt:
    """A prompt as its row gives it: without token ids and tool schemas."""

    prompt: Prompt
    where: str
    """The setting, the file and the row, for errors."""

    weight: float
    """Of the file."""


def load_prompts(
    files: Sequence[DataFile],
    codec: ChatEncoder,
    config: DataConfig,
    *,
    key: str,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    cache_folder: Path | None = None,
) -> PromptSet:
    """Read, tokenize and check the prompts of some files: `read_prompts`, then `encode_prompts`."""
    unencoded = read_prompts(files, config, key=key, cache_folder=cache_folder)
    return encode_prompts(unencoded, codec, config, key=key, tool_schemas=tool_schemas)


def read_prompts(
    files: Sequence[DataFile], config: DataConfig, *, key: str, cache_folder: Path | None = None
) -> list[UnencodedPrompt]:
    """Read the prompts of some files; `key` is the setting that named them.

    cache_folder: for copies of files with a scheme; None refuses these. Raises ValueError, see
    `read_rows`, `local_copy`, `PromptTemplate` and `own_dataset`, and for a malformed row and two
    rows with one id.
    """
    template = PromptTemplate(config.template) if config.template else None
    found: dict[str, UnencodedPrompt] = {}
    for row in _rows(files, config, key, cache_folder):
        one = UnencodedPrompt(_prompt(row, config, template), row.where, row.weight)
        if (first := found.setdefault(one.prompt.prompt_id, one)) is not one:
            raise ValueError(
                f"{row.where}: id {one.prompt.prompt_id} occurs twice, first in {first.where}; "
                f"expected extra_info.index to be unique within a {config.reward_fn_key}, over "
                "all files"
            )
    return list(found.values())


def encode_prompts(
    unencoded: Sequence[UnencodedPrompt],
    codec: ChatEncoder,
    config: DataConfig,
    *,
    key: str,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> PromptSet:
    """Tokenize the prompts that `read_prompts` read.

    tool_schemas: by tool name; those of a prompt's tools are rendered by the chat template.
    Raises ValueError for a prompt that is too long under `Truncation.error`, and when nothing is
    left.
    """
    schemas = tool_schemas or {}
    tools = [_tools_of(one.prompt, schemas) for one in unencoded]
    encoded = encode_all(
        codec,
        [(one.prompt.messages, names) for one, names in zip(unencoded, tools, strict=True)],
        schemas,
        key=key,
    )
    full = [
        replace(
            one.prompt,
            token_ids=tuple(ids),
            tool_schemas=tuple(schemas[name] for name in names),
        )
        for one, names, ids in zip(unencoded, tools, encoded, strict=True)
    ]
    return _fit(full, [one.weight for one in unencoded], codec, config, key)


def _tools_of(prompt: Prompt, schemas: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the tools that the chat template shows: the prompt's, or all of them."""
    chosen = [name for name, kwargs in prompt.tools_kwargs.items() if kwargs is not None]
    return tuple(name for name in chosen or schemas if name in schemas)


def _rows(
    files: Sequence[DataFile], config: DataConfig, key: str, cache_folder: Path | None
) -> Iterator[_Row]:
    local = {file: _local(file, key, cache_folder) for file in files}
    columns = (config.prompt_key, config.reward_fn_key, "reward_model")
    number = 0
    if config.dataset_class:
        found = dataset_class(config.dataset_class)
        for number, values in enumerate(own_rows(found, list(local.values()), key=key)):
            where = f"{key}, data.dataset_class={config.dataset_class} row {number}"
            check_columns(values, columns, where)
            yield _Row(values, where, number, 1.0)
        return
    for file, path in local.items():
        for index, values in enumerate(read_rows(path, key=key, columns=columns)):
            yield _Row(values, f"{key}={file.path} row {index}", number, file.weight)
            number += 1


def _local(file: DataFile, key: str, cache_folder: Path | None) -> str:
    if not file.is_copied:
        return file.path
    if cache_folder is None:
        raise ValueError(
            f"{key}={file.path}: expected a path without a scheme; probable cause: nothing is "
            "copied here, as there is no cache folder"
        )
    return str(local_copy(file.path, cache_folder, key=key))


def _prompt(row: _Row, config: DataConfig, template: PromptTemplate | None) -> Prompt:
    cell, where = row.values[config.prompt_key], row.where
    if isinstance(cell, str) and cell:
        cell = [{"role": "user", "content": cell}]
    messages = check_messages(cell, f"{where}, column {config.prompt_key}")
    if template is not None:
        messages = template.apply(messages, row.values, where)
    source = row.values[config.reward_fn_key]
    if not isinstance(source, str):
        raise ValueError(  # noqa: TRY004
            f"{where}, column {config.reward_fn_key}: got {source!r}, expected a string"
        )
    extra = without_nulls(row.values.get("extra_info") or {})
    tools_kwargs = extra.pop("tools_kwargs", {})
    if extra.get("need_tools_kwargs") and not tools_kwargs:
        _log.warning(
            "%s: no tools_kwargs, expected some; index %s, data source %s",
            *(where, extra.get("index", row.number), source),
        )
    return Prompt(
        prompt_id=f"{source}/{extra.get('index', row.number)}",
        data_source=source,
        messages=messages,
        ground_truth=_ground_truth(row.values["reward_model"], where),
        token_ids=(),
        tools_kwargs=tools_kwargs,
        extra_info=extra,
    )


def _fit(
    full: Sequence[Prompt],
    weights: Sequence[float],
    codec: ChatEncoder,
    config: DataConfig,
    key: str,
) -> PromptSet:
    """What is left of the prompts under `data.max_prompt_tokens`."""
    limit, truncation = config.max_prompt_tokens, config.truncation
    long = [prompt for prompt in full if len(prompt.token_ids) > limit]
    drops = truncation in (Truncation.error, Truncation.drop)
    if long and (truncation is Truncation.error or (drops and len(long) == len(full))):
        longest = max(len(prompt.token_ids) for prompt in long)
        raise ValueError(
            f"{key}: {len(long)} of {len(full)} prompts are longer than "
            f"data.max_prompt_tokens={limit} (the longest has {longest} tokens); raise it"
            + (", or set data.truncation=drop" if len(long) < len(full) else "")
        )
    if drops:
        kept = [row for row, prompt in enumerate(full) if len(prompt.token_ids) <= limit]
        return PromptSet(
            prompts=tuple(full[row] for row in kept),
            weights=tuple(weights[row] for row in kept),
            num_dropped=len(long),
        )
    fitted = tuple(
        _cut(prompt, codec, limit, truncation) if len(prompt.token_ids) > limit else prompt
        for prompt in full
    )
    return PromptSet(fitted, tuple(weights), num_cut=len(long))


def _cut(prompt: Prompt, codec: ChatEncoder, limit: int, truncation: Truncation) -> Prompt:
    without = codec.apply_chat(prompt.messages, list(prompt.tool_schemas) or None, generate=False)
    num_last = num_behind(prompt.token_ids, without)
    return replace(prompt, token_ids=cut(prompt.token_ids, num_last, limit, truncation))


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

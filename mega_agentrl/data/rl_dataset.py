"""Reads RL datasets from files or a user's dataset class into `Prompt` records.

Columns: `data.prompt_key` (`prompt`: chat messages, or a text that becomes one user message),
`data.reward_fn_key` (`data_source`), `reward_model` (a struct with `ground_truth`, any JSON value:
see `types.ground_truth`), and optionally `extra_info` (a struct with `index`, `tools_kwargs`,
`need_tools_kwargs` and `interaction_kwargs`). The keys of `tools_kwargs` select the prompt's tools;
without any it gets all tools, with a warning if `need_tools_kwargs` is set. `tools` (a JSON list of
function schemas) replaces the schemas of the run's tools in the chat template. The prompt id is
`data_source/index`; the index defaults to the row number over all files. Rows with the same id are
one prompt or get ids of their own (see `row_identity`). `data.image_key` and `data.video_key` name
columns of images and videos (see `prompt_images`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import Truncation
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import parse_json
from mega_agentrl.config.sections.data import DataFile
from mega_agentrl.data.chat_messages import validate_messages
from mega_agentrl.data.encoding.parallel_encode import encode_conversations
from mega_agentrl.data.prompt_template import PromptTemplate
from mega_agentrl.data.remote_files import fetch_to_cache
from mega_agentrl.data.row_identity import (
    FileDigest,
    PromptIds,
    digest_files,
    prompt_fingerprint,
)
from mega_agentrl.data.table_reader import (
    check_columns,
    check_nesting,
    drop_nulls,
    plain_value,
    read_rows,
)
from mega_agentrl.data.user_dataset import iter_user_rows, load_dataset_class
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Prompt
from mega_agentrl.vision.placeholders import image_parts, locate_images

if TYPE_CHECKING:
    from mega_agentrl.config.sections.data import DataConfig
    from mega_agentrl.data.prompt_images import PromptImageReader
    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.protocols import ChatCodec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptDataset:
    """The prompts of a dataset."""

    prompts: tuple[Prompt, ...]
    """Tokenized prompts within the length limit."""
    weights: tuple[float, ...]
    """Sampling weight of each prompt's file."""
    num_dropped: int = 0
    """Number of prompts that were dropped because they were too long."""
    num_truncated: int = 0
    files: tuple[FileDigest, ...] = ()
    """Digests of the files, overlong prompts included."""


@dataclass(frozen=True, slots=True)
class _LocatedRow:
    """A row with its origin."""

    values: Mapping[str, Any]
    """Values by column."""
    location: str
    """Setting, file and row, for error messages."""
    row_index: int
    """Row number over all files, from 0."""
    file: str
    """Path or URL of the file, or the user's dataset class."""
    file_weight: float
    """Sampling weight of the file."""
    folder: Path | None = None
    """Folder of the file; None for a row of a user's dataset."""


@dataclass(frozen=True, slots=True)
class UnencodedPrompt:
    """A prompt before tokenization."""

    prompt: Prompt
    """The prompt without token ids; its tool schemas are those of the row."""
    location: str
    """Setting, file and row, for error messages."""
    file: str
    """Path or URL of the file, or the user's dataset class."""
    file_weight: float
    """Sampling weight of the file."""
    fingerprint: bytes
    """Hash of the row's content."""


def load_prompts(
    files: Sequence[DataFile],
    codec: ChatCodec,
    config: DataConfig,
    *,
    key: str,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
    cache_folder: Path | None = None,
    images: PromptImageReader | None = None,
    keep_repeats: bool = False,
) -> PromptDataset:
    """Read and tokenize the prompts of files: `read_prompts`, then `encode_prompts`."""
    unencoded = read_prompts(
        files,
        config,
        key=key,
        cache_folder=cache_folder,
        images=images,
        keep_repeats=keep_repeats,
    )
    return encode_prompts(unencoded, codec, config, key=key, tool_schemas=tool_schemas)


def read_prompts(
    files: Sequence[DataFile],
    config: DataConfig,
    *,
    key: str,
    cache_folder: Path | None = None,
    images: PromptImageReader | None = None,
    keep_repeats: bool = False,
) -> list[UnencodedPrompt]:
    """Read the prompts of files.

    Equal rows with the same index are one prompt, with the largest weight of their files.

    Args:
        files: the files with their weights.
        config: names of the columns, prompt template and dataset class.
        key: configuration key of the files, for error messages.
        cache_folder: folder for local copies of remote files; None refuses these.
        images: reads the images of the rows; None for a model of text, which refuses them.
        keep_repeats: whether each repeated row is in the result, with the id of the first, as
            another sample of its question.

    Raises:
        ValueError: a file, the template or the dataset class cannot be read, a row is malformed,
            or an image cannot be used.
    """
    template = PromptTemplate(config.prompt_template) if config.prompt_template else None
    ids = PromptIds()
    prompts: list[UnencodedPrompt] = []
    place_by_id: dict[str, int] = {}
    without_tools: list[str] = []
    for row in _iter_rows(files, config, key, cache_folder):
        prompt = _parse_prompt(row, config, template, images)
        fingerprint = prompt_fingerprint(prompt)
        name, is_first = ids.assign(prompt.prompt_id, fingerprint, row.location)
        if prompt.extra_info.get("need_tools_kwargs") and not prompt.tools_kwargs:
            without_tools.append(row.location)
        if is_first or keep_repeats:
            place_by_id.setdefault(name, len(prompts))
            prompt = replace(prompt, prompt_id=name)
            prompts.append(
                UnencodedPrompt(prompt, row.location, row.file, row.file_weight, fingerprint)
            )
        elif row.file_weight > prompts[place_by_id[name]].file_weight:
            place = place_by_id[name]
            prompts[place] = replace(prompts[place], file_weight=row.file_weight)
    ids.report(
        key,
        "repeated rows count as further samples"
        if keep_repeats
        else "a repeated row does not count, a weight of its file does (path@2)",
    )
    _report_missing_tools(without_tools, key)
    if images is not None:
        images.verify()
    return prompts


def _report_missing_tools(locations: Sequence[str], key: str) -> None:
    """Log one line about rows that say that they need tools_kwargs and have none."""
    if locations:
        _log.warning(
            "%s: %s rows set need_tools_kwargs without tools_kwargs, so their prompts get all "
            "tools; the first is %s",
            *(key, len(locations), locations[0]),
        )


def encode_prompts(
    unencoded: Sequence[UnencodedPrompt],
    codec: ChatCodec,
    config: DataConfig,
    *,
    key: str,
    tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> PromptDataset:
    """Tokenize prompts and apply the length limit.

    Args:
        unencoded: the prompts that `read_prompts` read.
        codec: the chat template.
        config: length limit and truncation mode.
        key: configuration key of the files, for error messages.
        tool_schemas: schemas by tool name; the chat template renders those of a prompt's tools,
            unless its row has schemas of its own.

    Raises:
        ValueError: the chat template ignores the tools, a prompt is too long under
            `Truncation.error`, or no prompt is left.
    """
    schemas = tool_schemas or {}
    prompts = [item.prompt for item in unencoded]
    tools = [prompt.tool_schemas or _run_tool_schemas(prompt, schemas) for prompt in prompts]
    _check_tools_rendered(codec, tools)
    encoded = encode_conversations(
        codec,
        [(prompt.messages, offered) for prompt, offered in zip(prompts, tools, strict=True)],
        key=key,
    )
    encoded_prompts = [
        replace(
            prompt,
            token_ids=tuple(ids),
            tool_schemas=offered,
            images=_place_images(prompt, ids, codec),
        )
        for prompt, offered, ids in zip(prompts, tools, encoded, strict=True)
    ]
    dataset = _apply_length_limit(encoded_prompts, unencoded, codec, config, key)
    return replace(dataset, files=digest_files((item.file, item.fingerprint) for item in unencoded))


def _check_tools_rendered(codec: ChatCodec, tools: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Raise a `ConfigError` if the chat template ignores the schemas of prompts."""
    num_prompts = sum(bool(offered) for offered in tools)
    if num_prompts and not getattr(codec, "renders_tools", True):
        raise ConfigError(
            "model.path",
            getattr(codec, "folder", ""),
            f"a chat template that renders tools, because {num_prompts} prompts have function "
            "schemas (rollout.call_protocol=hermes, or a column tools)",
            "a template without a block for tools, such as chat_template.json of Qwen2.5-VL, which "
            "is taken if the template of tokenizer_config.json ignores images; write a "
            "chat_template.jinja that renders both into the folder (for example the former with "
            "the tools block of the latter), or use rollout.call_protocol=tags",
        )


def _place_images(
    prompt: Prompt, token_ids: Sequence[int], codec: ChatCodec
) -> tuple[PlacedImage, ...]:
    """Return the images of the prompt's messages, placed among its ids."""
    images = image_parts(prompt.messages)
    tokens = getattr(codec, "image_tokens", None)
    return locate_images(token_ids, images, tokens.image_id) if images and tokens else ()


def _run_tool_schemas(
    prompt: Prompt, schemas: Mapping[str, Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    """Return the schemas of the run's tools that the prompt selects, or all."""
    chosen = [name for name, kwargs in prompt.tools_kwargs.items() if kwargs is not None]
    return tuple(schemas[name] for name in chosen or schemas if name in schemas)


def _iter_rows(
    files: Sequence[DataFile], config: DataConfig, key: str, cache_folder: Path | None
) -> Iterator[_LocatedRow]:
    local = {file: _resolve_local_path(file, key, cache_folder) for file in files}
    columns = (config.prompt_key, config.reward_fn_key, "reward_model")
    number = 0
    if config.dataset_class:
        dataset_class = load_dataset_class(config.dataset_class)
        user_rows = iter_user_rows(dataset_class, list(local.values()), key=key)
        for number, values in enumerate(user_rows):
            where = f"{key}, data.dataset_class={config.dataset_class} index {number}"
            check_columns(values, columns, where)
            check_nesting(values, where)
            yield _LocatedRow(values, where, number, config.dataset_class, 1.0)
        return
    for file, path in local.items():
        for row in read_rows(path, key=key, columns=columns):
            where = f"{key}={file.path} {row.place}"
            yield _LocatedRow(row.values, where, number, file.path, file.weight, Path(path).parent)
            number += 1


def _resolve_local_path(file: DataFile, key: str, cache_folder: Path | None) -> str:
    if not file.needs_copy:
        return file.path
    if cache_folder is None:
        raise ConfigError(
            key,
            file.path,
            "a path without a scheme, because the caller gave no cache folder for remote files",
        )
    return str(fetch_to_cache(file.path, cache_folder, key=key))


def _parse_prompt(
    row: _LocatedRow,
    config: DataConfig,
    template: PromptTemplate | None,
    images: PromptImageReader | None,
) -> Prompt:
    cell, where = row.values[config.prompt_key], row.location
    if isinstance(cell, str):
        if not cell.strip():
            raise InputError(
                f"{where}, column {config.prompt_key}",
                cell,
                "a question or chat messages",
                "a row without a prompt, or another column is meant (data.prompt_key)",
            )
        cell = [{"role": "user", "content": cell}]
    messages = validate_messages(
        cell, f"{where}, column {config.prompt_key}", with_parts=images is not None
    )
    if template is not None:
        messages = template.apply(messages, row.values, where)
    if images is not None:
        messages = images.attach(messages, row.values, where, row.folder)
    else:
        refuse_images(row.values, row.location, config)
    source = row.values[config.reward_fn_key]
    if not isinstance(source, str):
        raise InputError(f"{where}, column {config.reward_fn_key}", source, "a string")
    extra = drop_nulls(
        _parse_struct(plain_value(row.values.get("extra_info")), f"{where}, column extra_info")
    )
    tools_kwargs = _parse_struct(extra.pop("tools_kwargs", None), f"{where}, tools_kwargs")
    for name, kwargs in tools_kwargs.items():
        _parse_struct(kwargs, f"{where}, tools_kwargs of {name}")
    return Prompt(
        prompt_id=f"{source}/{extra.get('index', row.row_index)}",
        data_source=source,
        messages=messages,
        ground_truth=_parse_ground_truth(
            row.values["reward_model"], f"{where}, column reward_model"
        ),
        token_ids=(),
        tools_kwargs=tools_kwargs,
        extra_info=extra,
        tool_schemas=parse_tool_schemas(row.values.get("tools"), f"{where}, column tools"),
    )


def refuse_images(row: Mapping[str, Any], where: str, config: DataConfig) -> None:
    """Raise a `ConfigError` if a row for a model of text has images or videos."""
    for key, column in (("image_key", config.image_key), ("video_key", config.video_key)):
        if column and row.get(column):
            raise ConfigError(
                f"{where}, column {column}",
                f"{type(row[column]).__name__} with images",
                f"none, because model.path is a model of text; data.{key}='' ignores the column",
                "a model without a vision tower, or another dataset",
            )


def _apply_length_limit(
    prompts: Sequence[Prompt],
    unencoded: Sequence[UnencodedPrompt],
    codec: ChatCodec,
    config: DataConfig,
    key: str,
) -> PromptDataset:
    """Drop or truncate prompts that are longer than `data.max_prompt_tokens`."""
    weights = [item.file_weight for item in unencoded]
    limit, truncation = config.max_prompt_tokens, config.truncation
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    drops = truncation in (Truncation.error, Truncation.drop)
    if too_long and (truncation is Truncation.error or (drops and len(too_long) == len(prompts))):
        longest = max(range(len(prompts)), key=lambda row: len(prompts[row].token_ids))
        expected = f"at least {len(prompts[longest].token_ids)}, the tokens of the longest prompt"
        raise ConfigError(
            "data.max_prompt_tokens",
            limit,
            f"{expected} ({unencoded[longest].location})"
            + (", or data.truncation=drop" if len(too_long) < len(prompts) else ""),
            f"{len(too_long)} of {len(prompts)} prompts of {key} are longer",
        )
    if drops:
        short_rows = [row for row, prompt in enumerate(prompts) if len(prompt.token_ids) <= limit]
        return PromptDataset(
            prompts=tuple(prompts[row] for row in short_rows),
            weights=tuple(weights[row] for row in short_rows),
            num_dropped=len(too_long),
        )
    fitted = tuple(
        _truncate_prompt(prompt, codec, limit, truncation)
        if len(prompt.token_ids) > limit
        else prompt
        for prompt in prompts
    )
    return PromptDataset(fitted, tuple(weights), num_truncated=len(too_long))


def _truncate_prompt(
    prompt: Prompt, codec: ChatCodec, limit: int, truncation: Truncation
) -> Prompt:
    ids_without = codec.apply_chat_template(
        prompt.messages, list(prompt.tool_schemas) or None, add_generation_prompt=False
    )
    num_last = num_generation_prompt_tokens(prompt.token_ids, ids_without)
    token_ids = truncate_tokens(prompt.token_ids, num_last, limit, truncation)
    if prompt.images:
        raise ConfigError(
            "data.truncation",
            truncation,
            f"error or drop for prompts with images, or data.max_prompt_tokens of at least "
            f"{len(prompt.token_ids)}, the length of {prompt.prompt_id}, of which its images take "
            f"{sum(placed.image.num_tokens for placed in prompt.images)}; fewer data.max_pixels "
            "make images shorter",
            "an image cannot be cut, and a question without its image cannot be answered",
        )
    return replace(prompt, token_ids=token_ids)


def parse_tool_schemas(cell: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the function schemas of a cell, none for null.

    A cell is JSON text, because parquet would merge the parameters of all functions into one type.

    Raises:
        ValueError: the cell holds something else; the message names `where`.
    """
    if cell is None:
        return ()
    try:
        schemas = parse_json(cell) if isinstance(cell, str) else cell
    except ValueError:
        schemas = cell
    if not isinstance(schemas, list) or not all(isinstance(item, dict) for item in schemas):
        raise InputError(where, cell, "JSON text, a list of function schemas")
    return tuple(schemas)


def _parse_struct(cell: Any, where: str) -> dict[str, Any]:
    """Return the members of a struct, none for null; raise `ValueError` for anything else."""
    if not isinstance(cell, dict | None):
        raise InputError(where, cell, "a struct")
    return cell or {}


def _parse_ground_truth(cell: Any, where: str) -> Any:
    """Return `ground_truth` of a struct, a JSON value; None if there is none."""
    truth = plain_value(_parse_struct(cell, where).get("ground_truth"))
    try:
        json.dumps(truth, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}, ground_truth", truth, "a JSON value", str(error)) from error
    return truth


def truncate_tokens(
    token_ids: Sequence[int], num_last: int, max_tokens: int, truncation: Truncation
) -> tuple[int, ...]:
    """Return at most `max_tokens` of the ids, with the generation prompt at their end.

    Of everything before it, including the tools that the template lists,

        left     removes the beginning,
        right    removes the end, usually of the last message,
        middle   removes the middle and keeps two halves that differ by at most one token.

    verl's `right` also cuts the generation prompt. A cut may fall between any two tokens. The
    messages of the prompt stay complete for rewards and reports; `rollout.template_check`, which
    compares the tokens with the rendered messages, reports every truncated prompt.

    Args:
        token_ids: ids of the prompt.
        num_last: number of tokens at the end that are always kept.
        max_tokens: maximum number of tokens.
        truncation: `left`, `right` or `middle`.

    Raises:
        ValueError: `num_last` leaves no room for other tokens, or `truncation` is another mode.
    """
    if len(token_ids) <= max_tokens:
        return tuple(token_ids)
    size = max_tokens - num_last
    if size < 1:
        expected = f"more than the {num_last} tokens of the generation prompt"
        raise ConfigError("data.max_prompt_tokens", max_tokens, expected)
    body = tuple(token_ids[: len(token_ids) - num_last])
    last = tuple(token_ids[len(token_ids) - num_last :])
    match truncation:
        case Truncation.left:
            return body[-size:] + last
        case Truncation.right:
            return body[:size] + last
        case Truncation.middle:
            return body[: size - size // 2] + body[len(body) - size // 2 :] + last
        case _:
            raise ConfigError("data.truncation", truncation, "left, right or middle")


def num_generation_prompt_tokens(token_ids: Sequence[int], ids_without: Sequence[int]) -> int:
    """Return the length of the generation prompt, given the ids with and without it."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, ids_without, strict=False))
    return len(token_ids) - sum(1 for _ in shared)

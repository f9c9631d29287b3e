"""Checks prompts and chat template, reading them as the run does.

Only the tokenizer is loaded, which transformers does without torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.checks.parallel import read_model_config, read_model_size
from mega_agentrl.config.checks.rollout import fitting_lengths
from mega_agentrl.config.enums import CallProtocol, TemplateCheck, Truncation
from mega_agentrl.config.ranges import MAX_TOKENS
from mega_agentrl.config.sections.data import DataFile, parse_data_files
from mega_agentrl.data.prompt_images import RemoteImageError
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.estimate.preflight.report import PreflightProblem
from mega_agentrl.estimate.preflight.suggestions import get_setting, with_overrides
from mega_agentrl.rollout.conversation.messages import template_drift, tool_message
from mega_agentrl.runtime.inputs import open_image_reader
from mega_agentrl.tool.toolkit import build_toolkit, load_mcp_servers, load_tools
from mega_agentrl.types.records import Prompt, Role, ToolOutcome, ToolStatus, Turn

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.data.encoding.codec import HFCodec

_ASSISTANT_TEXT, _ANSWER = "One moment.", "42"


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Prompt lengths of one data setting."""

    key: str
    """Configuration key of the files."""
    num_prompts: int
    max_prompt_tokens: int
    """Number of tokens of the longest prompt."""
    mean_prompt_tokens: float
    """Mean number of tokens of the prompts, as far as the run uses them (`data.truncation`)."""
    longest_prompt_id: str
    """Id of that prompt: its data source and index or row number."""
    num_too_long: int
    """Number of prompts above `data.max_prompt_tokens`."""


def has_tokenizer(config: TrainConfig) -> bool:
    """Return whether the model folder contains a tokenizer."""
    return (Path(config.model.path) / "tokenizer_config.json").is_file()


def inspect_prompts(
    config: TrainConfig,
) -> tuple[list[PromptFile], list[PreflightProblem], list[str]]:
    """Return the data files that exist, the problems found with them, and notes."""
    from mega_agentrl.data.encoding.codec import HFCodec

    codec = HFCodec(config.model.path)
    schemas = _schemas(config, codec)
    prompt_files, problems, remote_notes, sample = [], [], [], None
    unlimited = replace(config.data, max_prompt_tokens=MAX_TOKENS, truncation=Truncation.error)
    for key in ("data.train", "data.validation", "sft.dev_data"):
        files = _files(config, key)
        paths = [file.local_path for file in files if file.local_path is not None]
        if len(paths) < len(files):
            remote_notes.append(f"{key}: remote files are not checked")
            continue
        files = [replace(file, path=path) for file, path in zip(files, paths, strict=True)]
        exist = config.data.dataset_class or all(Path(path).is_file() for path in paths)
        if not files or not exist:
            continue
        try:
            loaded = load_prompts(
                files,
                codec,
                unlimited,
                key=key,
                tool_schemas=schemas,
                images=open_image_reader(config, None),
                keep_repeats=key != "data.train",
            )
        except RemoteImageError:
            remote_notes.append(
                f"{key}: images at URLs, and the prompts with them, are not checked"
            )
            continue
        except ValueError as error:
            problems.append(PreflightProblem(key, str(error)))
            continue
        sample = sample or loaded.prompts[0]
        lengths = [len(prompt.token_ids) for prompt in loaded.prompts]
        longest = loaded.prompts[lengths.index(max(lengths))].prompt_id
        num_too_long = sum(length > config.data.max_prompt_tokens for length in lengths)
        mean = _mean_used_tokens(config, lengths)
        prompt_files.append(
            PromptFile(key, len(lengths), max(lengths), mean, longest, num_too_long)
        )
    problems += _too_long(config, prompt_files)
    notes = _template_notes(config, codec, sample) if sample else []
    return prompt_files, problems, remote_notes + notes


def _files(config: TrainConfig, key: str) -> list[DataFile]:
    section, name = key.split(".")
    return list(parse_data_files(getattr(getattr(config, section), name), key))


def _schemas(config: TrainConfig, codec: HFCodec) -> Mapping[str, Mapping[str, Any]]:
    """Return the tool schemas that the chat template renders in the run, by tool name."""
    if config.rollout.call_protocol is CallProtocol.tags:
        return {}
    user_tools = load_tools(config.tool)
    kit = build_toolkit(
        with_overrides(config, {"tool.cache.path": ""}).tool,
        codec,
        user_tools=user_tools,
        mcp_servers=load_mcp_servers(
            config.tool, os.environ, user_tools=user_tools, protocol=config.rollout.call_protocol
        ),
        control_tokens=codec.control_tokens,
        protocol=config.rollout.call_protocol,
    )
    return kit.schemas()


def _mean_used_tokens(config: TrainConfig, lengths: list[int]) -> float:
    limit = config.data.max_prompt_tokens
    used = [min(length, limit) for length in lengths]
    if config.data.truncation is Truncation.drop:
        used = [length for length in lengths if length <= limit]
    return fmean(used) if used else 0.0


def _too_long(config: TrainConfig, files: list[PromptFile]) -> list[PreflightProblem]:
    limit, key = config.data.max_prompt_tokens, "data.max_prompt_tokens"
    return [
        PreflightProblem(
            key,
            f"{file.key}: {file.num_too_long} of {file.num_prompts} prompts are longer than "
            f"{key}={limit}; the longest, {file.longest_prompt_id}, has {file.max_prompt_tokens} "
            "tokens",
            (*_longer_prompts(config, file), "data.truncation=drop (from error)"),
        )
        for file in files
        if file.num_too_long and _is_refused(config.data.truncation, file)
    ]


def _longer_prompts(config: TrainConfig, file: PromptFile) -> list[str]:
    """Return the changes with which the longest prompt fits; none if the model is too short."""
    key, length = "data.max_prompt_tokens", file.max_prompt_tokens
    model = read_model_config(Path(config.model.path))
    longer = with_overrides(config, {key: length})
    others = fitting_lengths(longer, read_model_size(config, model, "max_position_embeddings"))
    if key in others:
        return []
    changes = {key: length, **others}
    return [" with ".join(f"{k}={v} (from {get_setting(config, k)})" for k, v in changes.items())]


def _is_refused(truncation: Truncation, file: PromptFile) -> bool:
    if truncation is Truncation.drop:
        return file.num_too_long == file.num_prompts
    return truncation is Truncation.error


def _template_notes(config: TrainConfig, codec: HFCodec, prompt: Prompt) -> list[str]:
    """Compare a conversation that is encoded turn by turn with its rendering as a whole."""
    if config.rollout.template_check is TemplateCheck.off:
        return []
    if (
        config.rollout.call_protocol is CallProtocol.tags
        and not config.rollout.interaction_config_file
    ):
        return []  # conversations have a single assistant turn
    outcome = ToolOutcome(tool="tool", status=ToolStatus.ok, answer=_ANSWER, latency_s=0.0)
    assistant_ids = [*codec.encode(_ASSISTANT_TEXT), codec.eos_id]
    token_ids = [
        *assistant_ids,
        *codec.encode_next_turn([tool_message(outcome, _ANSWER)]),
        *assistant_ids,
    ]
    turns = [
        Turn(index=0, role=Role.assistant, start=0, stop=0, text=_ASSISTANT_TEXT),
        Turn(index=1, role=Role.tool, start=0, stop=0, text=_ANSWER, outcome=outcome),
        Turn(index=2, role=Role.assistant, start=0, stop=0, text=_ASSISTANT_TEXT),
    ]
    mode = config.rollout.template_check
    drift = template_drift(prompt, token_ids, turns, codec, mode, in_chat=True)
    if not drift:
        return ["chat template: encoding turn by turn equals rendering the whole conversation"]
    return [
        f"chat template: {drift}; training uses the tokens as they were sampled. To render the "
        "conversation again for every turn: rollout.use_inference_chat_template=true"
    ]

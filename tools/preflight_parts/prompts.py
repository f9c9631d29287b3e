"""Prompts and chat template of a run, read the way the run will read them.

The tokenizer alone is loaded; `transformers` does that without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import CallProtocol, TemplateCheck, Truncation
from mega_agentrl.config.data_files import DataFile, data_files
from mega_agentrl.data.dataset import load_prompts
from mega_agentrl.estimate.change import changed
from mega_agentrl.estimate.verdict import Problem
from mega_agentrl.rollout.conversation import template_drift, tool_message
from mega_agentrl.tool.kit import build_toolkit
from mega_agentrl.types.records import Author, Prompt, ToolOutcome, ToolStatus, Turn

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.data.codec import HFCodec

_NO_LIMIT = 2**31
_SAID, _ANSWER = "One moment.", "42"


@dataclass(frozen=True, slots=True)
class PromptFile:
    """One data file. longest: tokens of its longest prompt. num_long: above the limit."""

    key: str
    num_prompts: int
    longest: int
    num_long: int


def has_tokenizer(config: TrainConfig) -> bool:
    """Whether the model's folder has one."""
    return (Path(config.model.path) / "tokenizer_config.json").is_file()


def look_at_prompts(config: TrainConfig) -> tuple[list[PromptFile], list[Problem], list[str]]:
    """Data files that are there, what is wrong with them, and what is worth knowing."""
    from mega_agentrl.data.codec import HFCodec

    codec = HFCodec(config.model.path)
    schemas = _schemas(config, codec)
    found, problems, away, sample = [], [], [], None
    unlimited = replace(config.data, max_prompt_tokens=_NO_LIMIT, truncation=Truncation.error)
    for key in ("data.train", "data.validation", "sft.dev"):
        files = _files(config, key)
        places = [file.local_path for file in files if file.local_path is not None]
        if len(places) < len(files):
            away.append(f"{key}: files that are not on this machine are not read here")
            continue
        files = [replace(file, path=place) for file, place in zip(files, places, strict=True)]
        there = config.data.dataset_class or all(Path(place).is_file() for place in places)
        if not files or not there:
            continue
        try:
            loaded = load_prompts(files, codec, unlimited, key=key, tool_schemas=schemas)
        except ValueError as error:
            problems.append(Problem(key, str(error)))
            continue
        sample = sample or loaded.prompts[0]
        lengths = [len(prompt.token_ids) for prompt in loaded.prompts]
        limit = config.data.max_prompt_tokens
        found.append(PromptFile(key, len(lengths), max(lengths), sum(n > limit for n in lengths)))
    problems += _too_long(config, found)
    notes = _template_notes(config, codec, sample) if sample else []
    return found, problems, away + notes


def _files(config: TrainConfig, key: str) -> list[DataFile]:
    section, name = key.split(".")
    return list(data_files(getattr(getattr(config, section), name), key))


def _schemas(config: TrainConfig, codec: HFCodec) -> Mapping[str, Mapping[str, Any]]:
    """As the run renders them: with function calls the template says what tools there are."""
    if config.rollout.call_protocol is CallProtocol.tags:
        return {}
    kit = build_toolkit(
        changed(config, {"tool.cache.path": ""}).tool,
        codec,
        control_tokens=codec.control_tokens,
        protocol=config.rollout.call_protocol,
    )
    return kit.schemas()


def _too_long(config: TrainConfig, files: list[PromptFile]) -> list[Problem]:
    limit, key = config.data.max_prompt_tokens, "data.max_prompt_tokens"
    return [
        Problem(
            key,
            f"{file.key}: {file.num_long} of {file.num_prompts} prompts are longer than "
            f"{key}={limit}, the longest has {file.longest} tokens",
            (f"{key}={file.longest} (from {limit})", "data.truncation=drop (from error)"),
        )
        for file in files
        if file.num_long and _is_refused(config.data.truncation, file)
    ]


def _is_refused(truncation: Truncation, file: PromptFile) -> bool:
    if truncation is Truncation.drop:
        return file.num_long == file.num_prompts
    return truncation is Truncation.error


def _template_notes(config: TrainConfig, codec: HFCodec, prompt: Prompt) -> list[str]:
    """What the template makes of a short conversation that grew turn by turn."""
    if config.rollout.template_check is TemplateCheck.off:
        return []
    if config.rollout.call_protocol is CallProtocol.tags and not config.rollout.interaction_file:
        return []  # a conversation of one assistant turn, which nothing is appended to
    outcome = ToolOutcome(tool="tool", status=ToolStatus.ok, answer=_ANSWER, latency_s=0.0)
    said = [*codec.encode(_SAID), codec.eos_id]
    token_ids = [*said, *codec.apply_next_turn([tool_message(outcome, _ANSWER)]), *said]
    turns = [
        Turn(index=0, author=Author.assistant, start=0, stop=0, text=_SAID),
        Turn(index=1, author=Author.tool, start=0, stop=0, text=_ANSWER, outcome=outcome),
        Turn(index=2, author=Author.assistant, start=0, stop=0, text=_SAID),
    ]
    mode = config.rollout.template_check
    drift = template_drift(prompt, token_ids, turns, codec, mode, in_chat=True)
    if not drift:
        return ["chat template: a conversation that grows turn by turn is what it renders whole"]
    return [
        f"chat template: {drift}; trajectories are trained on as they were sampled. To render "
        "every turn anew instead: rollout.use_inference_chat_template=true"
    ]

"""What a run reads before it starts anything: tokenizer, tools, users, data, all of it checked.

Every error here is a `ValueError` about the input, and nothing has to be ended after it. What the
parts become is `build`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import Branching, CotBlocks, Overlong
from mega_agentrl.data.codec import HFCodec
from mega_agentrl.data.cot_markers import cot_markers
from mega_agentrl.data.dataset import load_prompts
from mega_agentrl.data.sft import Demonstration, DemonstrationSampler, load_demonstrations
from mega_agentrl.data.trigger_words import load_words, trigger_ids
from mega_agentrl.reward.check import check_parts, check_prompts
from mega_agentrl.rollout.interaction_session import build_interactions
from mega_agentrl.runtime.reward_group import check_tokenizers
from mega_agentrl.runtime.sandbox_group import SandboxGroup
from mega_agentrl.tool.kit import build_toolkit

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.tool.kit import ToolKit
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.ports import Interactions
    from mega_agentrl.types.records import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """As `types.parts.Parts` has them; tools are not started yet."""

    codec: HFCodec
    tools: ToolKit
    interactions: Interactions
    prompts: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]
    dev: tuple[Prompt, ...]
    demonstrations: Callable[[], Callable[[int], TrainBatch]] | None
    cot_markers: tuple[tuple[int, ...], tuple[int, ...]] | None
    trigger_ids: frozenset[int] | None


def read_inputs(config: TrainConfig) -> Inputs:
    """Read and check it all; sets `config.total_steps` where `config.epochs` decides on it."""
    codec = HFCodec(config.model.path)
    tools = _toolkit(config, codec)
    _check_marks(codec, tools.marks)
    interactions = build_interactions(config.rollout.interaction_file, tools.names)
    check_parts(config.reward, (*tools.names, *interactions.names))
    # With tags the prompts say what there is; function calls need the template to say it.
    schemas = tools.schemas() if tools.answers_in_chat else {}
    prompts = _prompts(config, "data.train", config.data.train, codec, schemas)
    validation = _prompts(config, "data.validation", config.data.validation, codec, schemas)
    if config.epochs:
        config.total_steps = ceil(config.epochs * len(prompts) / config.data.prompts_per_step)
    dev: tuple[Prompt, ...] = ()
    demonstrations = None
    if config.sft.max_steps:
        dev = _prompts(config, "sft.dev", config.sft.dev, codec, schemas)
        loaded = load_demonstrations(config.sft.data, codec, max_tokens=config.engine.max_model_len)
        demonstrations = partial(_open_stream, loaded, config.seed)
    for kit in (tools, interactions):
        kit.check_prompts((*prompts, *validation, *dev))
    check_prompts(config.reward, (*prompts, *validation, *dev))
    if config.reward.serves_model:
        source = config.reward.model.source
        check_tokenizers(codec, HFCodec(source), source)
    return Inputs(
        codec=codec,
        tools=tools,
        interactions=interactions,
        prompts=prompts,
        validation=validation,
        dev=dev,
        demonstrations=demonstrations,
        cot_markers=_markers(config, codec),
        trigger_ids=_triggers(config, codec),
    )


def _open_stream(demonstrations: Sequence[Demonstration], seed: int) -> Callable[[int], TrainBatch]:
    return DemonstrationSampler(demonstrations, seed).next


def _toolkit(config: TrainConfig, codec: HFCodec) -> ToolKit:
    sandboxes = None
    if config.tool.python.hosts:
        sandboxes = SandboxGroup(config.tool.python, Path(config.run_dir) / "logs")
    return build_toolkit(
        config.tool,
        codec,
        control_tokens=codec.control_tokens,
        api_key=os.environ.get(config.tool.search.key_env, ""),
        sandboxes=sandboxes,
        escapes=config.rollout.branching is not Branching.released,
        protocol=config.rollout.call_protocol,
    )


def _check_marks(codec: HFCodec, marks: Iterable[str]) -> None:
    if lost := [mark for mark in marks if not codec.keeps(mark)]:
        raise ValueError(
            f"rollout.call_protocol: the tokenizer declares {', '.join(lost)} special, expected "
            "plain or added tokens; calls would be left out of what the policy said. Set "
            "`special` to false in tokenizer_config.json and tokenizer.json"
        )


def _markers(config: TrainConfig, codec: HFCodec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Of the chain of thought, where EGPO looks for it."""
    egpo = config.algo.egpo
    if not egpo.lam or egpo.blocks is CotBlocks.response:
        return None
    return cot_markers(codec, egpo.markers)


def _triggers(config: TrainConfig, codec: HFCodec) -> frozenset[int] | None:
    """Tokens behind which ARES counts windows; None: every one."""
    path = config.algo.ares.words
    return trigger_ids(codec, load_words(path), key=f"algo.ares.words={path}") if path else None


def _prompts(
    config: TrainConfig,
    key: str,
    path: str,
    codec: HFCodec,
    schemas: Mapping[str, Mapping[str, Any]],
) -> tuple[Prompt, ...]:
    loaded = load_prompts(
        path,
        codec,
        key=key,
        max_prompt_tokens=config.data.max_prompt_tokens,
        overlong=config.data.overlong,
        tool_schemas=schemas,
    )
    if loaded.num_dropped:
        assert config.data.overlong is Overlong.drop
        print(f"{key}: {loaded.num_dropped} overlong prompts dropped, {len(loaded.prompts)} kept")
    return loaded.prompts

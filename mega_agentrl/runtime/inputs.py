"""What a run reads before it starts anything: tokenizer, tools, users, data, all of it checked.

Every error here is a `ValueError` about the input, and nothing has to be ended after it. What the
parts become is `build`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import Branching, CotBlocks
from mega_agentrl.config.data_files import DataFile, data_files
from mega_agentrl.data.codec import HFCodec
from mega_agentrl.data.cot_markers import cot_markers
from mega_agentrl.data.dataset import PromptSet, load_prompts
from mega_agentrl.data.own_dataset import dataset_class
from mega_agentrl.data.sft import Demonstration, DemonstrationSampler, load_demonstrations
from mega_agentrl.data.trigger_words import load_words, trigger_ids
from mega_agentrl.reshard.model_shape import ModelShape
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
    """As `types.parts.Parts` has them; tools are not started yet. weights: of the prompts."""

    codec: HFCodec
    tools: ToolKit
    interactions: Interactions
    prompts: tuple[Prompt, ...]
    weights: tuple[float, ...]
    validation: tuple[Prompt, ...]
    dev: tuple[Prompt, ...]
    demonstrations: Callable[[], Callable[[int], TrainBatch]] | None
    cot_markers: tuple[tuple[int, ...], tuple[int, ...]] | None
    trigger_ids: frozenset[int] | None


def read_inputs(config: TrainConfig) -> Inputs:
    """Read and check it all; sets `config.total_steps` where `config.epochs` decides on it."""
    if config.data.dataset_class:
        dataset_class(config.data.dataset_class)  # before a tokenizer takes its seconds
    codec = HFCodec(config.model.path)
    tools = _toolkit(config, codec)
    _check_marks(codec, tools.marks)
    interactions = build_interactions(config.rollout.interaction_file, tools.names)
    check_parts(config.reward, (*tools.names, *interactions.names))
    # With tags the prompts say what there is; function calls need the template to say it.
    schemas = tools.schemas() if tools.answers_in_chat else {}
    files = data_files(config.data.train, "data.train")
    train = _prompts(config, "data.train", files, codec, schemas)
    prompts = train.prompts
    files = data_files(config.data.validation, "data.validation")
    validation = _prompts(config, "data.validation", files, codec, schemas).prompts
    if config.epochs:
        config.total_steps = ceil(config.epochs * sum(train.weights) / config.data.prompts_per_step)
    dev: tuple[Prompt, ...] = ()
    demonstrations = None
    if config.sft.max_steps:
        dev = _prompts(config, "sft.dev", [DataFile(config.sft.dev)], codec, schemas).prompts
        loaded = load_demonstrations(config.sft.data, codec, max_tokens=config.engine.max_model_len)
        demonstrations = partial(_open_stream, loaded, config.seed)
    for kit in (tools, interactions):
        kit.check_prompts((*prompts, *validation, *dev))
    check_prompts(config.reward, (*prompts, *validation, *dev))
    if config.reward.serves_model:
        source = config.reward.model.source
        check_tokenizers(codec, HFCodec(source), f"reward.model.source={source}")
    if config.model.reference:
        _check_reference(config, codec)
    return Inputs(
        codec=codec,
        tools=tools,
        interactions=interactions,
        prompts=prompts,
        weights=train.weights,
        validation=validation,
        dev=dev,
        demonstrations=demonstrations,
        cot_markers=_markers(config, codec),
        trigger_ids=_triggers(config, codec),
    )


def _check_reference(config: TrainConfig, codec: HFCodec) -> None:
    """Its weights must fit into the policy's ranks, and its tokens be the policy's."""
    folder = config.model.reference
    policy = asdict(ModelShape.from_folder(config.model.path))
    other = asdict(ModelShape.from_folder(folder))
    if names := [name for name in policy if policy[name] != other[name]]:
        raise ValueError(
            f"model.reference={folder}: got {', '.join(f'{n}={other[n]}' for n in names)}; "
            f"expected {', '.join(f'{n}={policy[n]}' for n in names)} as in model.path; probable "
            "cause: a model of another size"
        )
    check_tokenizers(codec, HFCodec(folder), f"model.reference={folder}")


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
    files: Sequence[DataFile],
    codec: HFCodec,
    schemas: Mapping[str, Mapping[str, Any]],
) -> PromptSet:
    loaded = load_prompts(
        files,
        codec,
        config.data,
        key=key,
        tool_schemas=schemas,
        cache_folder=data_cache(),
    )
    if loaded.num_dropped:
        print(f"{key}: {loaded.num_dropped} overlong prompts dropped, {len(loaded.prompts)} kept")
    if loaded.num_cut:
        print(f"{key}: {loaded.num_cut} of {len(loaded.prompts)} prompts were overlong and are cut")
    return loaded


def data_cache() -> Path:
    """Folder of the copies of remote data files: below `$XDG_CACHE_HOME`, or `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(folder) if folder else Path.home() / ".cache") / "mega_agentrl" / "data"

"""Reads and checks the input of a run before anything starts: data, tokenizer, tools, users.

Every error here is a `ValueError` about the input, and nothing has to be ended after it. What the
parts become is `build`'s business. Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

import os
import time
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
from mega_agentrl.data.dataset import PromptSet, UnencodedPrompt, encode_prompts, read_prompts
from mega_agentrl.data.sft import (
    Conversation,
    Demonstration,
    DemonstrationSampler,
    encode_demonstrations,
    read_conversations,
)
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reward.check import check_parts, check_prompts
from mega_agentrl.rollout.interaction_session import build_interactions
from mega_agentrl.runtime.cluster import check_local_size
from mega_agentrl.tool.kit import build_toolkit

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.tool.kit import ToolKit
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.ports import Interactions
    from mega_agentrl.types.records import Prompt

_PROBE = "<think> 12,345.6 \\boxed{x^2}\n</think> Größe 数学 </search> def f():\n    return 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The checked input of a run, field by field as in `types.parts.Parts`; no tool is started.

    weights: of the prompts. read_s: seconds it took to read them all.
    """

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
    read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The rows of all data files, checked but not tokenized."""

    train: Sequence[UnencodedPrompt]
    validation: Sequence[UnencodedPrompt]
    dev: Sequence[UnencodedPrompt]
    demonstrations: Sequence[Conversation]


def read_inputs(config: TrainConfig) -> Inputs:
    """Read and check it all; sets `config.total_steps` where `config.epochs` decides on it.

    What is cheap to check comes first: the size of the layout, unless a cluster is joined, then
    the rows of the data files, and only then what needs the tokenizer, which loads transformers.
    """
    start_s = time.perf_counter()
    if not config.cluster.address:
        check_local_size(config)
    tables = _read_tables(config)
    codec = HFCodec(config.model.path)
    tools = _toolkit(config, codec)
    _check_marks(codec, tools.marks)
    interactions = build_interactions(config.rollout.interaction_file, tools.names)
    check_parts(config.reward, (*tools.names, *interactions.names))
    # With tags the prompts say what there is; function calls need the template to say it.
    schemas = tools.schemas() if tools.answers_in_chat else {}
    train = _encode(tables.train, config, "data.train", codec, schemas)
    validation = _encode(tables.validation, config, "data.validation", codec, schemas)
    if config.epochs:
        config.total_steps = ceil(config.epochs * sum(train.weights) / config.data.prompts_per_step)
    dev = _encode(tables.dev, config, "sft.dev", codec, schemas)
    demonstrations = _demonstrations(tables.demonstrations, config, codec)
    prompts = (*train.prompts, *validation.prompts, *dev.prompts)
    for kit in (tools, interactions):
        kit.check_prompts(prompts)
    check_prompts(config.reward, prompts)
    _check_other_models(config, codec)
    return Inputs(
        codec=codec,
        tools=tools,
        interactions=interactions,
        prompts=train.prompts,
        weights=train.weights,
        validation=validation.prompts,
        dev=dev.prompts,
        demonstrations=demonstrations,
        cot_markers=_markers(config, codec),
        trigger_ids=_triggers(config, codec),
        read_s=time.perf_counter() - start_s,
    )


def _read_tables(config: TrainConfig) -> _Tables:
    read = partial(read_prompts, config=config.data, cache_folder=data_cache())
    train = read(data_files(config.data.train, "data.train"), key="data.train")
    validation = read(data_files(config.data.validation, "data.validation"), key="data.validation")
    dev: Sequence[UnencodedPrompt] = ()
    demonstrations: Sequence[Conversation] = ()
    if config.sft.max_steps:
        dev = read([DataFile(config.sft.dev)], key="sft.dev")
        demonstrations = read_conversations(config.sft.data)
    return _Tables(train=train, validation=validation, dev=dev, demonstrations=demonstrations)


def _check_other_models(config: TrainConfig, codec: HFCodec) -> None:
    """Their tokenizers, and the shape of the reference."""
    if config.reward.serves_model:
        source = config.reward.model.source
        check_tokenizers(codec, HFCodec(source), f"reward.model.source={source}")
    if config.model.reference:
        _check_reference(config, codec)


def check_tokenizers(policy: HFCodec, judge: HFCodec, source: str) -> None:
    """Raise `ValueError` where the two do not give the same ids. source: key and value."""
    if policy.vocab_size != judge.vocab_size or policy.encode(_PROBE) != judge.encode(_PROBE):
        raise ValueError(
            f"{source}: its tokenizer has {judge.vocab_size} tokens and the "
            f"policy's {policy.vocab_size}, or they give different ids; expected the same, token "
            "ids go to it as they are; probable cause: another family (a reward model can "
            "be served by an OpenAI-compatible server: give its address instead)"
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


def _demonstrations(
    conversations: Sequence[Conversation], config: TrainConfig, codec: HFCodec
) -> Callable[[], Callable[[int], TrainBatch]] | None:
    if not conversations:
        return None
    encoded = encode_demonstrations(conversations, codec, max_tokens=config.engine.max_model_len)
    return partial(_open_stream, encoded, config.seed)


def _open_stream(demonstrations: Sequence[Demonstration], seed: int) -> Callable[[int], TrainBatch]:
    return DemonstrationSampler(demonstrations, seed).next


def _toolkit(config: TrainConfig, codec: HFCodec) -> ToolKit:
    sandboxes = None
    if config.tool.python.hosts:
        from mega_agentrl.runtime.sandbox_group import SandboxGroup

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
    if not path:
        return None
    from mega_agentrl.data.trigger_words import load_words, trigger_ids

    return trigger_ids(codec, load_words(path), key=f"algo.ares.words={path}")


def _encode(
    unencoded: Sequence[UnencodedPrompt],
    config: TrainConfig,
    key: str,
    codec: HFCodec,
    schemas: Mapping[str, Mapping[str, Any]],
) -> PromptSet:
    loaded = encode_prompts(unencoded, codec, config.data, key=key, tool_schemas=schemas)
    if loaded.num_dropped:
        print(f"{key}: {loaded.num_dropped} overlong prompts dropped, {len(loaded.prompts)} kept")
    if loaded.num_cut:
        print(f"{key}: {loaded.num_cut} of {len(loaded.prompts)} prompts were overlong and are cut")
    return loaded


def data_cache() -> Path:
    """Folder of the copies of remote data files: below `$XDG_CACHE_HOME`, or `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(folder) if folder else Path.home() / ".cache") / "mega_agentrl" / "data"

"""Builds the parts of a run from its configuration, and ends them all.

Order: everything that can be wrong in the input is read first (tokenizer, tools,
data, corpus, sandbox), then Ray starts, then policy and engines start side by side. Only where
sandboxes are on other nodes (`tool.python.hosts`) the tools start after Ray, before the rest.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.config.choices import Branching, CotBlocks, Overlong
from mega_agentrl.data.codec import HFCodec
from mega_agentrl.data.cot_markers import cot_markers
from mega_agentrl.data.dataset import load_prompts
from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.data.sft import DemonstrationSampler, load_demonstrations
from mega_agentrl.data.trigger_words import load_words, trigger_ids
from mega_agentrl.reward.check import check_parts, check_prompts
from mega_agentrl.rollout.interaction_session import build_interactions
from mega_agentrl.runtime.bridge import WeightBridge
from mega_agentrl.runtime.cluster import connect
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.policy_group import PolicyGroup
from mega_agentrl.runtime.reward_group import RewardGroup, check_tokenizers
from mega_agentrl.runtime.rewards import open_rubric
from mega_agentrl.runtime.sandbox_group import SandboxGroup
from mega_agentrl.tool.kit import build_toolkit
from mega_agentrl.types.parts import Parts

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.records import Prompt


@contextmanager
def build(config: TrainConfig) -> Iterator[Parts]:
    """All parts, ready; every process is ended on the way out, whatever happened.

    Raises `ValueError` for bad input before an engine starts, and before Ray does where it needs
    no cluster to be found.
    """
    start_s = time.perf_counter()
    run_dir = Path(config.run_dir)
    codec = HFCodec(config.model.path)
    hosted = config.tool.python.hosts > 0
    tools = build_toolkit(
        config.tool,
        codec,
        control_tokens=codec.control_tokens,
        api_key=os.environ.get(config.tool.search.key_env, ""),
        sandboxes=SandboxGroup(config.tool.python, run_dir / "logs") if hosted else None,
        escapes=config.rollout.branching is not Branching.released,
        protocol=config.rollout.call_protocol,
    )
    _check_marks(codec, tools.marks)
    marked, triggered = _markers(config, codec), _triggers(config, codec)
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
        demonstrations = DemonstrationSampler(loaded, config.seed).next
    for kit in (tools, interactions):
        kit.check_prompts((*prompts, *validation, *dev))
    check_prompts(config.reward, (*prompts, *validation, *dev))
    if config.reward.serves_model:
        source = config.reward.model.source
        check_tokenizers(codec, HFCodec(source), source)
    with ExitStack() as stack:
        rubric = stack.enter_context(open_rubric(config.reward))
        # One loop for the whole run, in the thread whose end ends the sandboxes.
        runner = stack.enter_context(asyncio.Runner())

        def start_tools() -> None:
            stack.callback(tools.close_now)
            runner.run(tools.start())

        if not hosted:
            start_tools()
        policy, generator = _start_groups(
            config, stack, run_dir / "logs", start_tools if hosted else None
        )
        reward_model = _start_reward_model(config, stack, run_dir / "logs")
        yield Parts(
            run_dir=run_dir,
            policy=policy,
            generator=generator,
            tools=tools,
            codec=codec,
            rubric=rubric,
            reward_model=reward_model,
            prompts=PromptSampler(prompts, config.seed),
            validation=validation,
            dev=dev,
            demonstrations=demonstrations,
            start_s=time.perf_counter() - start_s,
            wait=runner.run,
            interactions=interactions,
            cot_markers=marked,
            trigger_ids=triggered,
        )


def _start_groups(
    config: TrainConfig,
    stack: ExitStack,
    log_folder: Path,
    start_tools: Callable[[], None] | None,
) -> tuple[PolicyGroup, GeneratorGroup]:
    on_gpu = connect(config)
    stack.callback(ray.shutdown)
    if start_tools is not None:
        start_tools()
    generator = GeneratorGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(generator.close)
    policy = PolicyGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(policy.close)
    starting = generator.begin_start()
    policy.start()
    generator.finish_start(starting)
    bridge = WeightBridge(policy, generator, config, dtype="bfloat16" if on_gpu else "float32")
    (log_folder / "weights.txt").write_text(bridge.connect().describe() + "\n")
    policy.attach(bridge)
    return policy, generator


def _start_reward_model(
    config: TrainConfig, stack: ExitStack, log_folder: Path
) -> RewardGroup | None:
    if not config.reward.serves_model:
        return None
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    group = RewardGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(group.close)
    group.start()
    return group


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

"""Builds the parts of a run from its configuration and its input, and ends them all.

Order: what can still be wrong in the input is opened first (trackers, then corpus and sandbox),
then Ray starts, then policy and engines start side by side, or on shared GPUs the engines before
the policy. Only where sandboxes are on other nodes (`tool.python.hosts`) the tools start after
Ray, before the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.report.span_export import open_tracer
from mega_agentrl.report.trackers.open import open_trackers
from mega_agentrl.rollout.spans import RolloutSpans
from mega_agentrl.runtime.bridge import WeightBridge
from mega_agentrl.runtime.cluster import connect
from mega_agentrl.runtime.critic_group import CriticGroup
from mega_agentrl.runtime.engine_keeper import EngineKeeper
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.gpu_watch import ClusterGpus
from mega_agentrl.runtime.loop_thread import LoopThread
from mega_agentrl.runtime.memory_watch import GroupMemory
from mega_agentrl.runtime.policy_group import PolicyGroup
from mega_agentrl.runtime.remote import DiedError, RankGoneError
from mega_agentrl.runtime.reward_group import RewardGroup
from mega_agentrl.runtime.rewards import open_rubric
from mega_agentrl.runtime.turns import Turns
from mega_agentrl.types.parts import Parts
from mega_agentrl.types.watch import Watch

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.runtime.inputs import Inputs

_logger = logging.getLogger(__name__)


@contextmanager
def build(config: TrainConfig, inputs: Inputs) -> Iterator[Parts]:
    """All parts, ready; every process is ended on the way out, whatever happened.

    inputs: what `read_inputs` read for this configuration. Raises `ValueError` for bad input
    before an engine starts, and before Ray does where it needs no cluster to be found.
    """
    start_s = time.perf_counter()
    run_dir = Path(config.run_dir)
    tools, hosted = inputs.tools, config.tool.python.hosts > 0
    with ExitStack() as stack:
        trackers = stack.enter_context(open_trackers(run_dir, config.report))
        spans = stack.enter_context(_open_spans(config))
        rubric = stack.enter_context(open_rubric(config.reward))
        # One loop for the whole run.
        runner: asyncio.Runner | LoopThread = (
            LoopThread() if config.rollout.staleness else asyncio.Runner()
        )
        stack.enter_context(runner)

        def start_tools() -> None:
            stack.callback(tools.close_now)
            runner.run(tools.start())

        if not hosted:
            start_tools()
        policy, generator = _start_groups(
            config, stack, run_dir / "logs", start_tools if hosted else None
        )
        reward_model = _start_reward_model(config, stack, run_dir / "logs")
        gpus = ClusterGpus.launch()
        if gpus is not None:
            stack.callback(gpus.close)
        critic = _start_critic(config, stack, run_dir / "logs")
        yield Parts(
            run_dir=run_dir,
            policy=policy,
            generator=generator,
            tools=tools,
            codec=inputs.codec,
            rubric=rubric,
            reward_model=reward_model,
            prompts=PromptSampler(
                inputs.prompts, config.seed, weights=inputs.weights, order=config.data.order
            ),
            critic=critic,
            validation=inputs.validation,
            dev=inputs.dev,
            demonstrations=inputs.demonstrations,
            start_s=inputs.read_s + time.perf_counter() - start_s,
            wait=runner.run,
            interactions=inputs.interactions,
            cot_markers=inputs.cot_markers,
            trigger_ids=inputs.trigger_ids,
            watch=Watch(
                trackers=trackers,
                gpus=gpus,
                memory=GroupMemory(policy, generator),
                spans=spans,
                gpu_name=policy.gpu_name(),
            ),
        )


@contextmanager
def _open_spans(config: TrainConfig) -> Iterator[RolloutSpans | None]:
    with open_tracer(config.report.spans, Path(config.run_dir).name) as tracer:
        spans = None if tracer is None else RolloutSpans(tracer)
        try:
            yield spans
        finally:
            if spans is not None:
                spans.close()


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
    launch = _launch_together if config.cluster.colocated else _launch_apart
    policy, generator, turns = launch(config, stack, on_gpu, log_folder)
    dtype = "bfloat16" if on_gpu else "float32"
    bridge = WeightBridge(policy, generator, config, dtype=dtype, turns=turns)
    (log_folder / "weights.txt").write_text(bridge.connect().describe() + "\n")
    policy.attach(bridge)
    keeper = EngineKeeper(generator, bridge, turns=turns)
    generator.keep(keeper)
    bridge.keep(keeper)
    stack.callback(keeper.close)
    keeper.start()
    return policy, generator


def _launch_apart(
    config: TrainConfig, stack: ExitStack, on_gpu: bool, log_folder: Path
) -> tuple[PolicyGroup, GeneratorGroup, None]:
    """Both with GPUs of their own, started side by side."""
    generator = GeneratorGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(generator.close)
    policy = PolicyGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(policy.close)
    starting = generator.begin_start()
    _start(policy)
    _finish_start(generator, starting)
    return policy, generator, None


def _start(policy: PolicyGroup) -> None:
    """Once more where a rank dies meanwhile; if it dies again, that is no accident."""
    try:
        policy.start()
    except RankGoneError as error:
        _logger.warning("the policy is started once more: %s", error)
        policy.restart()


def _finish_start(generator: GeneratorGroup, starting: dict[str, Any]) -> None:
    """Once more where an engine's process dies meanwhile. starting: by engine, in their order."""
    try:
        generator.finish_start(starting)
    except DiedError as error:
        _logger.warning("an engine is started once more: %s", error)
        index, again = generator.begin_replace(list(starting).index(error.name))
        generator.finish_start(starting | again)
        generator.admit(index)


def _launch_together(
    config: TrainConfig, stack: ExitStack, on_gpu: bool, log_folder: Path
) -> tuple[PolicyGroup, GeneratorGroup, Turns]:
    """The policy's ranks get the GPUs, the engines start there and sleep, the model is loaded."""
    policy = PolicyGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(policy.close)
    generator = GeneratorGroup.launch(
        config, on_gpu=on_gpu, log_folder=log_folder, lodging=policy.lodging
    )
    stack.callback(generator.close)
    _finish_start(generator, generator.begin_start())
    turns = Turns(policy, generator)
    policy.share(turns)
    _start(policy)
    return policy, generator, turns


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


def _start_critic(config: TrainConfig, stack: ExitStack, log_folder: Path) -> CriticGroup | None:
    if not config.algo.needs_critic or config.validates_only:
        return None
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    group = CriticGroup.launch(config, on_gpu=on_gpu, log_folder=log_folder)
    stack.callback(group.close)
    group.start()
    return group

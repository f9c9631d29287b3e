"""Build the components of a run from its configuration and inputs, and close them at the end.

Components that can fail because of the input are opened first: trackers, rubric, tools. Meanwhile
Ray starts (`cluster.ClusterConnection`). Then policy and engines start in parallel; on shared GPUs
(`cluster.colocated`) the engines start before the policy. If sandboxes run on other nodes
(`tool.python.num_hosts`), the tools start after Ray and before policy and engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.report.start_progress import StartProgress
from mega_agentrl.report.trace_export import open_tracer
from mega_agentrl.report.trackers.factory import open_trackers
from mega_agentrl.rollout.agents.agent_loop import AgentLoop
from mega_agentrl.rollout.agents.host import AgentHost
from mega_agentrl.rollout.gateway.server import Gateway
from mega_agentrl.rollout.tracing import RolloutSpans
from mega_agentrl.runtime.coordinator import Coordinator
from mega_agentrl.runtime.driver_monitor import (
    DriverMonitor,
    gateway_metrics,
    watch_rollout_loop,
)
from mega_agentrl.runtime.event_loop_thread import EventLoopThread
from mega_agentrl.runtime.gpu_monitor import ClusterGpuMonitor
from mega_agentrl.runtime.memory_monitor import ClusterMemoryMonitor, RemoteMemoryWatches
from mega_agentrl.runtime.memory_watch import MemoryWatch
from mega_agentrl.runtime.remote_calls import (
    DEATHS,
    ModelRankDiedError,
    PolicyRankDiedError,
    ProcessDiedError,
)
from mega_agentrl.runtime.rubric import open_rubric
from mega_agentrl.runtime.weight_sync import WeightSynchronizer
from mega_agentrl.runtime.workers.auxiliary_groups import (
    AuxiliaryGroup,
    CriticGroup,
    RewardModelGroup,
)
from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
from mega_agentrl.runtime.workers.gpu_time_sharing import GpuTimeSharing, ModelTurns
from mega_agentrl.runtime.workers.placement import Placement
from mega_agentrl.runtime.workers.policy_group import PolicyGroup
from mega_agentrl.types.components import Components
from mega_agentrl.types.monitoring import Monitors

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.planner.traffic import TransferTraffic
    from mega_agentrl.runtime.cluster import ClusterConnection
    from mega_agentrl.runtime.inputs import RunInputs
    from mega_agentrl.runtime.workers.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class _RunStart:
    """State that all steps of the start share."""

    config: TrainConfig
    stack: ExitStack
    """Closes all started components at the end of the run."""
    cluster: ClusterConnection
    progress: StartProgress

    @property
    def log_folder(self) -> Path:
        """Folder of the log files of all processes."""
        return Path(self.config.run_dir) / "logs"


_logger = logging.getLogger(__name__)


@contextmanager
def build(
    config: TrainConfig, inputs: RunInputs, cluster: ClusterConnection
) -> Iterator[Components]:
    """Build all components; every process is ended on exit, also after an error.

    Ray is the exception: it ends with `cluster`.

    Raises:
        ValueError: The input is invalid. Raised before an engine starts and, unless the cluster is
            needed to find the error, before Ray starts.
    """
    progress = StartProgress(inputs.read_time_s)
    run_dir = Path(config.run_dir)
    tools, has_sandbox_hosts = inputs.tools, config.tool.python.num_hosts > 0
    with ExitStack() as stack:
        trackers = stack.enter_context(open_trackers(run_dir, config.report))
        spans = stack.enter_context(_open_spans(config))
        rubric = stack.enter_context(
            open_rubric(config.reward, max_failed_first_calls=config.rollout.max_failed_first_calls)
        )
        # One event loop for the whole run.
        runner: asyncio.Runner | EventLoopThread = (
            EventLoopThread() if config.rollout.max_staleness else asyncio.Runner()
        )
        stack.enter_context(runner)

        start = _RunStart(config, stack, cluster, progress)

        def start_tools() -> None:
            progress.begin("tools", "sandboxes and the search index")
            stack.callback(tools.close_now)
            runner.run(tools.start())

        if not has_sandbox_hosts:
            start_tools()
        agents = _start_gateway(inputs, stack, runner)
        driver_monitor = _start_driver_monitor(start, runner, agents)
        coordinator, policy, generator = _start_policy_and_engines(
            start, start_tools if has_sandbox_hosts else None
        )
        reward_model = critic = None
        if config.reward.hosts_reward_model:
            reward_model = _start_model(RewardModelGroup, start, policy, coordinator)
        gpu_monitor = ClusterGpuMonitor.launch()
        if gpu_monitor is not None:
            stack.callback(gpu_monitor.close)
        if config.algo.needs_critic and not config.is_eval_only:
            critic = _start_model(CriticGroup, start, policy, coordinator)
        progress.finish()
        yield Components(
            run_dir=run_dir,
            policy=coordinator,
            generator=generator,
            tools=tools,
            codec=inputs.codec,
            rubric=rubric,
            reward_model=reward_model,
            prompt_source=_open_prompt_source(inputs, config),
            critic=critic,
            validation_prompts=inputs.validation,
            dev_prompts=inputs.dev,
            make_demonstration_batches=inputs.demonstrations,
            startup_s=progress.elapsed_s,
            run_coroutine=runner.run,
            interactions=inputs.interactions,
            agents=agents,
            images=inputs.images,
            cot_marker_ids=inputs.cot_markers,
            trigger_ids=inputs.trigger_ids,
            monitors=Monitors(
                trackers=trackers,
                gpu=gpu_monitor,
                memory=ClusterMemoryMonitor(policy, generator),
                driver=driver_monitor,
                rollout_spans=spans,
                gpu_name=policy.gpu_name(),
            ),
        )


def _open_prompt_source(inputs: RunInputs, config: TrainConfig) -> PromptSampler:
    return PromptSampler(
        inputs.prompts,
        config.seed,
        weights=inputs.prompt_weights,
        order=config.data.order,
        files=inputs.prompt_files,
        accept_changed_rows=config.data.accept_changed_rows,
    )


def _start_gateway(
    inputs: RunInputs, stack: ExitStack, runner: asyncio.Runner | EventLoopThread
) -> AgentHost | None:
    """Start the gateway and the event loop of the user's agent, if there is one."""
    loaded = inputs.agents
    if loaded is None:
        return None
    gateway = Gateway(loaded.gateway)
    stack.callback(lambda: runner.run(gateway.close()))
    runner.run(gateway.start())
    return AgentHost(
        agent=loaded.agent,
        gateway=gateway,
        loop=stack.enter_context(AgentLoop()),
        timeout_s=loaded.timeout_s,
        max_concurrent=loaded.max_concurrent,
        policy_errors=loaded.policy_errors,
    )


def _start_driver_monitor(
    start: _RunStart, runner: asyncio.Runner | EventLoopThread, agents: AgentHost | None
) -> DriverMonitor:
    """Start to watch this process, and the memory of all machines of the run."""
    loops = {"loop": start.stack.enter_context(watch_rollout_loop(runner))}
    if agents is not None:
        loops["agent_loop"] = agents.loop.watchdog
    remote = None
    if start.config.cluster.ray_address:
        start.cluster.wait()
        remote = RemoteMemoryWatches.launch(start.log_folder)
        start.stack.callback(remote.close)
    return start.stack.enter_context(
        DriverMonitor(
            loops,
            MemoryWatch(start.log_folder, driver_pid=os.getpid(), deaths=DEATHS),
            None if agents is None else partial(gateway_metrics, agents.gateway),
            remote,
        )
    )


@contextmanager
def _open_spans(config: TrainConfig) -> Iterator[RolloutSpans | None]:
    with open_tracer(config.report.trace_destination, Path(config.run_dir).name) as tracer:
        spans = None if tracer is None else RolloutSpans(tracer)
        try:
            yield spans
        finally:
            if spans is not None:
                spans.close()


def _start_policy_and_engines(
    start: _RunStart, start_tools: Callable[[], None] | None
) -> tuple[Coordinator, PolicyGroup, GeneratorGroup]:
    config = start.config
    start.progress.begin("Ray")
    on_gpu = start.cluster.wait()
    if start_tools is not None:
        start_tools()
    launch = _launch_colocated if config.cluster.colocated else _launch_disaggregated
    policy, generator = launch(start, on_gpu)
    kernels = f"the policy computes with: {policy.kernels()}"
    _logger.info(kernels)
    start.progress.note(kernels)
    start.progress.begin("weight transfer", "layouts and links of all ranks")
    weight_sync = WeightSynchronizer(
        policy, generator, config, dtype=str(config.model.dtype.resolve(on_gpu=on_gpu))
    )
    models = ModelTurns(policy)
    gpus = GpuTimeSharing(models, generator) if config.cluster.colocated else None
    coordinator = Coordinator(policy, generator, weight_sync, models, gpus)
    start.stack.callback(coordinator.close)
    coordinator.start()
    traffic = _connect(coordinator)
    (start.log_folder / "weights.txt").write_text(traffic.summary() + "\n")
    return coordinator, policy, generator


def _connect(coordinator: Coordinator) -> TransferTraffic:
    """Open the link of the weight transfer; restart the policy once if a rank dies meanwhile."""
    try:
        return coordinator.connect()
    except PolicyRankDiedError as error:
        _logger.warning("restarting the policy: %s", error)
        coordinator.restart()
        return coordinator.connect()


def _launch_disaggregated(start: _RunStart, on_gpu: bool) -> tuple[PolicyGroup, GeneratorGroup]:
    """Start policy and engines in parallel, each on GPUs of their own."""
    _begin_policy_stage(start)
    placement = _reserve_placement(start, on_gpu)
    generator = GeneratorGroup.launch(
        start.config, on_gpu=on_gpu, log_folder=start.log_folder, placement=placement
    )
    start.stack.callback(generator.close)
    start_calls = generator.submit_start()
    policy = PolicyGroup.launch(
        start.config, on_gpu=on_gpu, log_folder=start.log_folder, placement=placement
    )
    start.stack.callback(policy.close)
    _start_ranks(policy)
    start.progress.begin("engines", _engine_imports(start.config))
    _wait_for_engines(generator, start_calls)
    return policy, generator


def _reserve_placement(start: _RunStart, on_gpu: bool) -> Placement:
    """Reserve the resources of policy and engines until the end of the run."""
    placement = Placement(start.config, on_gpu=on_gpu, with_engines=True)
    start.stack.callback(placement.release)
    return placement


def _begin_policy_stage(start: _RunStart) -> None:
    """Report that the policy starts, and whether its ranks share CPU cores."""
    num_ranks, num_cores = start.config.parallel.world_size, len(os.sched_getaffinity(0))
    sharing = f" on {num_cores} cores" if num_ranks > num_cores else ""
    subject = "1 rank imports" if num_ranks == 1 else f"{num_ranks} ranks import"
    start.progress.begin("policy", f"{subject} PyTorch and Megatron{sharing}")


def _engine_imports(config: TrainConfig) -> str:
    count = config.cluster.num_engines
    return "1 engine imports vLLM" if count == 1 else f"{count} engines import vLLM"


def _start_ranks(group: RankGroup) -> None:
    """Start the ranks of a model; retry once if one of them dies during the start."""
    try:
        group.start()
    except (PolicyRankDiedError, ModelRankDiedError) as error:
        _logger.warning("restarting the %s: %s", group.model_name, error)
        group.restart()


def _wait_for_engines(generator: GeneratorGroup, start_calls: dict[str, Any]) -> None:
    """Wait until all engines have started; restart each once that dies meanwhile."""
    restarted: set[int] = set()
    while True:
        try:
            generator.wait_started(start_calls)
        except ProcessDiedError as error:
            index = list(start_calls).index(error.process_name)
            if index in restarted:
                raise
            _logger.warning("restarting an engine: %s", error)
            restarted.add(index)
            start_calls = start_calls | generator.respawn_engine(index)
        else:
            break
    for index in restarted:
        generator.enable_routing(index)


def _launch_colocated(start: _RunStart, on_gpu: bool) -> tuple[PolicyGroup, GeneratorGroup]:
    """Start the engines on the ranks' GPUs and put them to sleep, then load the policy."""
    start.progress.begin("engines", _engine_imports(start.config))
    placement = _reserve_placement(start, on_gpu)
    policy = PolicyGroup.launch(
        start.config, on_gpu=on_gpu, log_folder=start.log_folder, placement=placement
    )
    start.stack.callback(policy.close)
    generator = GeneratorGroup.launch(
        start.config,
        on_gpu=on_gpu,
        log_folder=start.log_folder,
        placement=placement,
        shared_gpus=policy.gpus_for_engine,
    )
    start.stack.callback(generator.close)
    _wait_for_engines(generator, generator.submit_start())
    _begin_policy_stage(start)
    _start_ranks(policy)
    return policy, generator


def _start_model[Group: AuxiliaryGroup](
    group_class: type[Group], start: _RunStart, policy: PolicyGroup, coordinator: Coordinator
) -> Group:
    """Start all ranks of the critic or the reward model."""
    start.progress.begin(group_class.model_name, "its ranks import PyTorch and Megatron")
    is_sharing = start.config.cluster.colocated_models
    group = group_class.launch(
        start.config,
        on_gpu=start.cluster.wait(),
        log_folder=start.log_folder,
        host=policy if is_sharing else None,
    )
    start.stack.callback(group.close)
    if is_sharing:
        group.share_gpus(
            partial(coordinator.reserve_gpus, group), partial(coordinator.model_turn, group)
        )
    _start_ranks(group)
    return group

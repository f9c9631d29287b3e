"""Megatron ranks of any model as Ray actors: start, named calls, liveness, end.

`RankActor` is the process of one rank, `RankGroup` the driver's handle on all of them. Every rank
sends heartbeats (`heartbeat`), and every wait for ranks checks them, so that a stopped or blocked
rank is reported long before the call's timeout.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from mega_agentrl.runtime.free_port import free_port
from mega_agentrl.runtime.gloo_interface import use_interface_of
from mega_agentrl.runtime.heartbeat import HeartbeatMonitor, HeartbeatSender
from mega_agentrl.runtime.remote_calls import (
    DEATH_ERRORS,
    ModelRankDiedError,
    ProcessDiedError,
    RemoteCallError,
    describe_death,
    gather,
    redirect_output,
)
from mega_agentrl.runtime.workers.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest, FileRecord
    from mega_agentrl.actor.megatron_model import RankInfo
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.runtime.heartbeat import HeartbeatEndpoint


_DEAD_RANK_WAIT_S = 15.0
"""Time in seconds to find dead ranks after one of them has failed; Ray learns of a death late where
other programs use all cores."""


class RankActor:
    """Process of one rank.

    `heartbeat` is an endpoint and the rank's name in its heartbeats, `gpus` the CUDA names of the
    GPUs that it shares with another process, None if Ray gives it one.
    """

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        world_size: int,
        log_file: str,
        heartbeat: tuple[HeartbeatEndpoint, str] | None = None,
        gpus: str | None = None,
    ) -> None:
        redirect_output(Path(log_file))
        use_interface_of(ray.util.get_node_ip_address())
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        # torch reads these variables when it is imported.
        self._num_threads = num_threads_per_rank(config, *_node_slots())
        os.environ["OMP_NUM_THREADS"] = str(self._num_threads)
        # By default each rank starts a process per core, up to 32, that compiles kernels. vLLM sets
        # this variable in the engines itself.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(self._num_threads)
        # Read when CUDA starts. With one queue, kernels start in the order of their launch, so that
        # communication begins before the computation that it overlaps with.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if config.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        self._config = config
        self._rank = rank
        self._world_size = world_size
        if heartbeat is not None:
            self._heartbeat_sender = HeartbeatSender(*heartbeat)

    def find_free_address(self) -> tuple[str, int]:
        """Return this node's IP address and a free port."""
        return ray.util.get_node_ip_address(), free_port()

    def visible_gpus(self) -> str:
        """Return the CUDA names of the GPUs that this process may use; empty if it has none."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def _rank_info(self, master_address: str, master_port: int) -> RankInfo:
        from mega_agentrl.actor.megatron_model import RankInfo

        return RankInfo(
            rank=self._rank,
            world_size=self._world_size,
            master_address=master_address,
            master_port=master_port,
            timeout_s=self._config.cluster.call_timeout_s,
            num_threads=self._num_threads,
        )


def num_threads_per_rank(config: TrainConfig, num_node_slots: int, on_gpu: bool) -> int:
    """Return the CPU threads per rank: a node's ranks share half of its cores, engines the rest.

    On CPUs the ranks have all cores of a run in which policy and engines take turns.

    Args:
        config: The run.
        num_node_slots: Number of ranks that this node has room for.
        on_gpu: Whether the node has GPUs.
    """
    if config.deterministic:
        return 1
    num_cores = len(os.sched_getaffinity(0))
    if on_gpu or not config.takes_turns:
        num_cores //= 2
    return max(1, num_cores // min(config.parallel.world_size, num_node_slots))


def _node_slots() -> tuple[int, bool]:
    """Return the number of GPUs that Ray has on this node, or of its CPUs, and which they are."""
    node_id = ray.get_runtime_context().get_node_id()
    resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    num_gpus = int(resources.get("GPU", 0))
    return max(1, num_gpus or int(resources.get("CPU", 0))), num_gpus > 0


class RankGroup:
    """All ranks of one model.

    Calls wait for the ranks at most `cluster.call_timeout_s`; then they raise a `RemoteCallError`
    that names the operation and the rank that failed or is silent.
    """

    model_name: ClassVar[str]
    """Name of the model in errors."""
    log_prefix: ClassVar[str]
    """Prefix of the ranks' log files."""
    actor_class: ClassVar[type[RankActor]]
    """Actor class of a rank."""

    def __init__(self, actors: Sequence[Any], config: TrainConfig) -> None:
        self._actors = list(actors)
        self._config = config
        # Imports torch, which the processes of the ranks must not do before they set its variables.
        from mega_agentrl.runtime.workers.batch_sender import BatchSender

        self._sender = BatchSender(config)
        self._placement: Placement | None = None
        self._owns_placement = False
        self._visible_gpus: list[str] = []
        self._heartbeat_monitor: HeartbeatMonitor | None = None
        self._relaunch: Callable[[], None] | None = None

    @classmethod
    def launch(
        cls,
        config: TrainConfig,
        *,
        on_gpu: bool,
        log_folder: Path,
        placement: Placement | None = None,
        host: RankGroup | None = None,
    ) -> Self:
        """Create the actors; `start` then builds the model in them.

        Args:
            config: Configuration of the run.
            on_gpu: Whether the ranks run on GPUs.
            log_folder: Folder for one log file per rank.
            placement: Resources of the ranks, which the caller releases; None reserves them here.
            host: Group whose ranks these share their GPUs with, each with that of its number; None
                for GPUs of their own.
        """
        group = cls([], config)
        if host is not None:
            placement = host._placement
        group._placement, group._owns_placement = placement, placement is None
        group._relaunch = partial(group._start_processes, config, on_gpu, log_folder, host)
        group._relaunch()
        return group

    def restart(self) -> None:
        """Kill the remaining ranks and start all of them again from the initial state."""
        assert self._relaunch is not None, "a group that was not launched cannot be restarted"
        self._kill_ranks()
        self._release_own_placement()
        self._relaunch()
        self.start()

    def _start_processes(
        self, config: TrainConfig, on_gpu: bool, log_folder: Path, host: RankGroup | None
    ) -> None:
        layout = config.parallel
        self._config = config
        if self._placement is None:
            self._placement = Placement(config, on_gpu=on_gpu)
        placement = self._placement
        self._heartbeat_monitor = HeartbeatMonitor(ray.util.get_node_ip_address())
        is_alone = host is None
        gpus = [None] * layout.world_size if host is None else host.visible_gpus()
        remote_class = ray.remote(num_cpus=int(is_alone), num_gpus=int(is_alone and on_gpu))(
            self.actor_class
        )
        self._actors = [
            remote_class.options(scheduling_strategy=placement.for_rank(rank)).remote(
                config,
                rank,
                layout.world_size,
                str(log_folder / f"{self.log_prefix}-rank{rank}.log"),
                (self._heartbeat_monitor.endpoint, self.rank_name(rank)),
                gpus[rank],
            )
            for rank in range(layout.world_size)
        ]

    def start(self) -> None:
        """Let all ranks join the process groups and build the model."""
        name = self.rank_name(0)
        address = {name: self._actors[0].find_free_address.remote()}
        host, port = self.gather(f"address of the {self.model_name}", address)[name]
        self.gather(f"start of the {self.model_name}", self.submit_to_ranks("start", host, port))
        if self._heartbeat_monitor is not None:
            self._heartbeat_monitor.end_startup()

    def submit_to_ranks(self, method: str, *args: Any) -> dict[str, Any]:
        """Start a method of every rank's actor; return object refs by rank name."""
        return self.submit_each(method, [args] * len(self._actors))

    def submit_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        """Start a method of every rank, each with its own arguments; return refs by name."""
        return {
            self.rank_name(rank): getattr(actor, method).remote(*args)
            for rank, (actor, args) in enumerate(zip(self._actors, arguments, strict=True))
        }

    def call_data_ranks(
        self, method: str, shards: Sequence[tuple[Any, ...]], *args: Any
    ) -> list[Any]:
        """Call a method of all ranks and wait; return the results in rank order.

        Args:
            method: Method of the ranks.
            shards: First arguments of the ranks of each data rank.
            args: Further arguments.
        """
        layout = self._config.parallel
        arguments = [
            (method, *shards[layout.data_rank(rank)], *args) for rank in range(len(self._actors))
        ]
        calls = self.submit_each("call", arguments)
        return list(self.gather(f"{self.model_name} {method}", calls).values())

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks and wait; return the results in rank order."""
        calls = self.submit_to_ranks("call", method, *args)
        return list(self.gather(f"{self.model_name} {method}", calls).values())

    def visible_gpus(self) -> list[str]:
        """Return the CUDA names of the GPU of each rank, empty on CPUs."""
        if not self._visible_gpus:
            calls = self.submit_to_ranks("visible_gpus")
            self._visible_gpus = list(self.gather(f"GPUs of the {self.model_name}", calls).values())
        return self._visible_gpus

    def set_gpu_resident(self, parts: frozenset[str]) -> None:
        """Keep `parts` ("weights", "gradients", "optimizer") on the GPUs, and offload the rest."""
        self.call_all("set_gpu_resident", parts)

    def start_save(self, folder: Path) -> CheckpointManifest:
        """Let the ranks of a trained model copy their state and start to write it to a folder."""
        manifest: CheckpointManifest = self.call_all("start_save", str(folder.resolve()))[0]
        return manifest

    def save_result(self, wait_s: float) -> dict[str, FileRecord] | None:
        """Return the files of all ranks by name; None if a rank is not done after `wait_s`."""
        answers = self.call_all("save_result", wait_s)
        if None in answers:
            return None
        return {name: record for files in answers for name, record in files.items()}

    def abandon_save(self) -> None:
        """End the running save, if there is one."""
        self.call_all("abandon_save")

    def gather(self, operation: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the calls within the timeout; return results by rank name."""
        try:
            return gather(calls, operation, self._config.cluster.call_timeout_s, self.check_alive)
        except RemoteCallError as error:
            raise self.diagnose(error) from error

    def check_alive(self) -> None:
        """Raise `ProcessDiedError` if a rank sends no more heartbeats."""
        if self._heartbeat_monitor is not None:
            self._heartbeat_monitor.check(
                [self.rank_name(rank) for rank in range(len(self._actors))]
            )

    def diagnose(self, error: RemoteCallError) -> Exception:
        """Return a `ModelRankDiedError` if a rank is dead or silent, else the error."""
        if isinstance(error, ProcessDiedError) and error.process_name.startswith(self.model_name):
            return ModelRankDiedError(str(error), error.process_name, error.operation)
        if dead := self._find_dead_ranks():
            message = f"{error}; the cause: {'; '.join(dead.values())}"
            return ModelRankDiedError(message, next(iter(dead)), error.operation)
        if self._heartbeat_monitor is None or isinstance(error, ProcessDiedError):
            return error
        message = f"{error}\nLast activities of the ranks: {self._heartbeat_monitor.describe()}"
        return RemoteCallError(message, error.operation, error.processes)

    def _find_dead_ranks(self) -> dict[str, str]:
        """Return how each dead rank died, by its name in alphabetical order."""
        calls = {
            actor.find_free_address.remote(): self.rank_name(k)
            for k, actor in enumerate(self._actors)
        }
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_DEAD_RANK_WAIT_S)
        dead = {}
        for call in ready:
            try:
                ray.get(call)
            except DEATH_ERRORS as error:
                dead[calls[call]] = describe_death(calls[call], error)
        return dict(sorted(dead.items()))

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank in errors."""
        return f"{self.model_name} rank {rank}"

    def close(self) -> None:
        """Kill every rank; safe to call twice."""
        self._kill_ranks()
        self._release_own_placement()

    def _kill_ranks(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._heartbeat_monitor is not None:
            self._heartbeat_monitor.close()
            self._heartbeat_monitor = None

    def _release_own_placement(self) -> None:
        if self._placement is not None and self._owns_placement:
            self._placement.release()
            self._placement = None

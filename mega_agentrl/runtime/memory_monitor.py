"""Peak memory of policy ranks and engine workers, as metrics of a step.

    memory/policy_peak_mib, memory/engine_peak_mib             maximum over ranks or workers
    memory/policy_libraries_mib, memory/engine_libraries_mib   on CPUs: before a model was loaded
    memory/max_micro_batch_tokens                              largest micro-batch trained on

On CPUs, memory is counted in private pages (`estimate.host_memory`). On GPUs it is the memory that
torch's allocator has reserved, without the CUDA context, NCCL and, for engines, CUDA graphs.
Processes that are dead or do not answer in time are left out.

In a joined cluster, `RemoteMemoryWatches` runs a `MemoryWatch` on each machine other than the
driver's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mega_agentrl.runtime.memory_watch import MemoryWatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
    from mega_agentrl.runtime.workers.policy_group import PolicyGroup

MEMORY_ANSWER_TIMEOUT_S = 1.0
"""Timeout in seconds for the answers of all processes together."""


class ClusterMemoryMonitor:
    """`types.monitoring.MemoryMonitor` over the processes of a run."""

    def __init__(self, policy: PolicyGroup, generator: GeneratorGroup) -> None:
        self._policy, self._generator = policy, generator

    def collect(self) -> Mapping[str, float]:
        """Query all processes and return the metrics of those that answered in time."""
        ranks = list(self._policy.submit("memory_stats").values())
        routable = self._generator.routable_engines
        engines = list(self._generator.submit("memory", engines=routable).values())
        refs = [*ranks, *engines]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=MEMORY_ANSWER_TIMEOUT_S)
        rank_stats = [stats for ref in ranks if ref in ready for stats in _get_stats(ref)]
        worker_stats = [stats for ref in engines if ref in ready for stats in _get_stats(ref)]
        return memory_metrics(rank_stats, worker_stats)


def memory_metrics(
    ranks: Sequence[Mapping[str, float]], workers: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of policy ranks and engine workers that the module docstring lists."""
    metrics = {}
    for owner, all_stats in (("policy", ranks), ("engine", workers)):
        for name in ("peak_mib", "libraries_mib"):
            if values := [stats[name] for stats in all_stats if name in stats]:
                metrics[f"memory/{owner}_{name}"] = max(values)
    key = "micro_batch_tokens"
    if tokens := [stats[key] for stats in ranks if key in stats]:
        metrics["memory/max_micro_batch_tokens"] = max(tokens)
    return metrics


def _get_stats(ref: Any) -> Sequence[Mapping[str, float]]:
    """Return the statistics of a rank, or of all workers of an engine; empty if the call failed."""
    try:
        stats = ray.get(ref)
    except ray.exceptions.RayError:
        return []
    return [stats] if isinstance(stats, dict) else list(stats)


class MemoryWatchActor:
    """The memory watch of one machine, as a Ray actor."""

    def __init__(self, log_folder: Path, where: str) -> None:
        self._watch = MemoryWatch(log_folder, where=where)

    def check(self) -> tuple[list[str], int]:
        """Look once; return the lines to report and the number of kernel kills so far."""
        return self._watch.check(), self._watch.num_kills


class RemoteMemoryWatches:
    """`driver_monitor.RemoteWatches`, with at most one pending look per machine."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        """Create the watches from actors by the name of their machine."""
        self._actors = dict(actors)
        self._pending: dict[str, Any] = {}
        self._num_kills: dict[str, int] = {}

    @classmethod
    def launch(cls, log_folder: Path) -> RemoteMemoryWatches:
        """Start an actor, which reserves no core, on each machine but this one."""
        own_id = ray.get_runtime_context().get_node_id()
        remote_class = ray.remote(num_cpus=0)(MemoryWatchActor)
        return cls(
            {
                node["NodeManagerHostname"]: remote_class.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote(log_folder, f" on {node['NodeManagerHostname']}")
                for node in ray.nodes()
                if node["Alive"] and node["NodeID"] != own_id
            }
        )

    @property
    def num_kills(self) -> int:
        """Processes that the kernels have killed for memory so far."""
        return sum(self._num_kills.values())

    def check(self) -> list[str]:
        """Return the lines that have come since the last call; never waits."""
        lines = []
        for name, actor in list(self._actors.items()):
            if name not in self._pending:
                self._pending[name] = actor.check.remote()
            call = self._pending[name]
            if not ray.wait([call], timeout=0)[0]:
                continue
            del self._pending[name]
            try:
                new_lines, self._num_kills[name] = ray.get(call)
            except ray.exceptions.RayError:  # the machine is lost, which others report
                del self._actors[name]
            else:
                lines += new_lines
        return lines

    def close(self) -> None:
        """Kill the actors; safe to call twice."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors, self._pending = {}, {}

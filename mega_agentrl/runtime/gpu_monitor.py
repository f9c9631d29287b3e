"""Monitor the GPUs of all nodes of the cluster with one sampler actor per node.

A sampler reserves no core and no GPU. The driver queries all samplers once per step and never
blocks on one: a late answer counts for the next step, and a lost node is dropped with one warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mega_agentrl.report.gpu.nvml_reader import open_nvml_reader
from mega_agentrl.report.gpu.sampler import GpuSampler, aggregate_gpu_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.gpu.sampler import GpuSummary

GPU_ANSWER_TIMEOUT_S = 1.0
"""Timeout in seconds for the answers of all samplers together; they answer from memory."""

_logger = logging.getLogger(__name__)


class NodeGpuSampler:
    """The GPU sampler of one node, as a Ray actor."""

    def __init__(self) -> None:
        reader = open_nvml_reader()
        self._sampler = None if reader is None else GpuSampler(reader)

    def collect(self) -> Sequence[GpuSummary]:
        """Return a summary per GPU since the last call; empty without a driver."""
        return [] if self._sampler is None else self._sampler.collect()


class ClusterGpuMonitor:
    """`types.monitoring.GpuMonitor` over one sampler per node, by node name."""

    def __init__(self, samplers: Mapping[str, Any]) -> None:
        self._samplers = dict(samplers)
        self._pending: dict[str, Any] = {}

    @classmethod
    def launch(cls) -> ClusterGpuMonitor | None:
        """Start the samplers; return None if no node has a GPU."""
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0)]
        if not nodes:
            return None
        remote_class = ray.remote(num_cpus=0, num_gpus=0)(NodeGpuSampler)
        return cls(
            {
                node["NodeManagerHostname"]: remote_class.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote()
                for node in nodes
            }
        )

    def collect(self) -> Mapping[str, float | str]:
        """Query all samplers and aggregate the answers that have arrived."""
        for name, sampler in self._samplers.items():
            if name not in self._pending:
                self._pending[name] = sampler.collect.remote()
        if not self._pending:
            return {}
        refs = list(self._pending.values())
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=GPU_ANSWER_TIMEOUT_S)
        nodes = [name for name, ref in self._pending.items() if ref in ready]
        return aggregate_gpu_metrics({name: self._get_summaries(name) for name in nodes})

    def close(self) -> None:
        """Kill the samplers; safe to call twice."""
        for sampler in self._samplers.values():
            ray.kill(sampler, no_restart=True)
        self._samplers, self._pending = {}, {}

    def _get_summaries(self, name: str) -> Sequence[GpuSummary]:
        ref = self._pending.pop(name)
        try:
            answer: Sequence[GpuSummary] = ray.get(ref)
        except ray.exceptions.RayError as error:
            _logger.warning("the GPUs of %s are no longer monitored: %s", name, error)
            del self._samplers[name]
            return []
        return answer

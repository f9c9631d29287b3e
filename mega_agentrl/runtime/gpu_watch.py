"""The GPUs of all nodes of the cluster, watched by a sampler on each.

A node with GPUs gets an actor that takes no core and no GPU and only samples; without GPUs in the
cluster there is none. The driver asks them all once a step and takes what has arrived: an answer
that is late counts for the next step, and a node that is gone is left out, with one warning, and
is not started again. Nobody waits for a node.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mega_agentrl.report.gpu_metrics import gpu_metrics
from mega_agentrl.report.gpu_reader import open_reader
from mega_agentrl.report.gpu_sampler import GpuSampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.gpu_sampler import GpuSummary

ANSWER_S = 1.0
"""How long a step waits for all answers together: a sampler answers from memory."""

_log = logging.getLogger(__name__)


class NodeSampler:
    """The sampler of one node, in a process of its own."""

    def __init__(self) -> None:
        reader = open_reader()
        self._sampler = None if reader is None else GpuSampler(reader)

    def take(self) -> Sequence[GpuSummary]:
        """See `GpuSampler.take`; empty without a driver."""
        return [] if self._sampler is None else self._sampler.take()


class ClusterGpus:
    """A `types.watch.GpuWatch` over samplers by their nodes' names."""

    def __init__(self, samplers: Mapping[str, Any]) -> None:
        self._samplers = dict(samplers)
        self._asked: dict[str, Any] = {}

    @classmethod
    def launch(cls) -> ClusterGpus | None:
        """Start the samplers; None where no node has a GPU."""
        nodes = [one for one in ray.nodes() if one["Alive"] and one["Resources"].get("GPU", 0)]
        if not nodes:
            return None
        remote_class = ray.remote(num_cpus=0, num_gpus=0)(NodeSampler)
        return cls(
            {
                node["NodeManagerHostname"]: remote_class.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ).remote()
                for node in nodes
            }
        )

    def take(self) -> Mapping[str, float | str]:
        """See `types.watch.GpuWatch`."""
        for name, sampler in self._samplers.items():
            if name not in self._asked:
                self._asked[name] = sampler.take.remote()
        if not self._asked:
            return {}
        refs = list(self._asked.values())
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S)
        answered = [name for name, ref in self._asked.items() if ref in ready]
        return gpu_metrics({name: self._answer(name) for name in answered})

    def close(self) -> None:
        """End the samplers; safe to call twice."""
        for sampler in self._samplers.values():
            ray.kill(sampler, no_restart=True)
        self._samplers, self._asked = {}, {}

    def _answer(self, name: str) -> Sequence[GpuSummary]:
        ref = self._asked.pop(name)
        try:
            answer: Sequence[GpuSummary] = ray.get(ref)
        except ray.exceptions.RayError as error:
            _log.warning("the GPUs of %s are not watched any more: %s", name, error)
            del self._samplers[name]
            return []
        return answer

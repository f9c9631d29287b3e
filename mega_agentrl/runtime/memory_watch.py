"""What policy ranks and engines have taken of memory at most, as metrics of a step.

    memory/policy_peak_mib, memory/engine_peak_mib             the most of any rank or worker
    memory/policy_libraries_mib, memory/engine_libraries_mib   on CPUs: before there was a model
    memory/micro_batch_tokens                                  of the largest one trained on

On CPUs these are private pages (`estimate.measured`), on GPUs what torch's allocator holds, which
leaves out CUDA's context, NCCL and, of an engine, CUDA graphs outside the allocator. Asked once a
step; who does not answer in time is left out of it, and a dead one is others' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
import ray.exceptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from mega_agentrl.runtime.generator_group import GeneratorGroup
    from mega_agentrl.runtime.policy_group import PolicyGroup

ANSWER_S = 1.0
"""How long a step waits for all answers together: they come from memory."""


class GroupMemory:
    """A `types.watch.MemoryWatch` over the processes of a run."""

    def __init__(self, policy: PolicyGroup, generator: GeneratorGroup) -> None:
        self._policy, self._generator = policy, generator

    def take(self) -> Mapping[str, float]:
        """See `types.watch.MemoryWatch`."""
        ranks = list(self._policy.start_call("memory").values())
        only = self._generator.admitted
        engines = list(self._generator.start_call("memory", only=only).values())
        refs = [*ranks, *engines]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S)
        of_ranks = [found for ref in ranks if ref in ready for found in _answer(ref)]
        of_workers = [found for ref in engines if ref in ready for found in _answer(ref)]
        return memory_metrics(of_ranks, of_workers)


def memory_metrics(
    ranks: Sequence[Mapping[str, float]], workers: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The metrics of the module; ranks: figures of policy ranks, workers: of engines' workers."""
    metrics = {}
    for who, figures in (("policy", ranks), ("engine", workers)):
        for name in ("peak_mib", "libraries_mib"):
            if values := [one[name] for one in figures if name in one]:
                metrics[f"memory/{who}_{name}"] = max(values)
    if tokens := [one["micro_batch_tokens"] for one in ranks if "micro_batch_tokens" in one]:
        metrics["memory/micro_batch_tokens"] = max(tokens)
    return metrics


def _answer(ref: Any) -> Sequence[Mapping[str, float]]:
    """Figures of a rank, or of all workers of an engine; none of one that failed."""
    try:
        found = ray.get(ref)
    except ray.exceptions.RayError:
        return []
    return [found] if isinstance(found, dict) else list(found)

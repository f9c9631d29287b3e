"""All GPUs of a run as a few metrics: with 64 nodes nobody looks at 512 curves.

gpu/<quantity>/mean, min, max   over all GPUs
gpu/<quantity>/worst            the GPU at its worst end, `<node> GPU <index>`: the least
                                `util` and `power_w`, which point at the one that waits or is
                                slowed down, the most of all else
gpu/<errors>/sum                errors since the last step; `worst` where there are any
gpu/num                         GPUs that were read
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.report.gpu_reader import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.gpu_sampler import GpuSummary

QUANTITIES = ("util", "memory_gib", "power_w", "temperature_c")
LOW_IS_WORSE = ("util", "power_w")


def gpu_metrics(by_node: Mapping[str, Sequence[GpuSummary]]) -> dict[str, float | str]:
    """The metrics of one step; empty without a GPU. by_node: summaries by the node's name."""
    values: dict[str, dict[str, float]] = {}
    num_gpus = 0
    for node, summaries in by_node.items():
        num_gpus += len(summaries)
        for summary in summaries:
            for name, value in summary.values.items():
                values.setdefault(name, {})[f"{node} GPU {summary.index}"] = value
    if not num_gpus:
        return {}
    metrics: dict[str, float | str] = {"gpu/num": float(num_gpus)}
    for name in QUANTITIES:
        if name in values:
            metrics |= _spread(name, values[name])
    for name in COUNTERS:
        if name in values:
            metrics |= _errors(name, values[name])
    return metrics


def _spread(name: str, by_gpu: Mapping[str, float]) -> dict[str, float | str]:
    least, most = min(by_gpu, key=by_gpu.__getitem__), max(by_gpu, key=by_gpu.__getitem__)
    return {
        f"gpu/{name}/mean": sum(by_gpu.values()) / len(by_gpu),
        f"gpu/{name}/min": by_gpu[least],
        f"gpu/{name}/max": by_gpu[most],
        f"gpu/{name}/worst": least if name in LOW_IS_WORSE else most,
    }


def _errors(name: str, by_gpu: Mapping[str, float]) -> dict[str, float | str]:
    metrics: dict[str, float | str] = {f"gpu/{name}/sum": sum(by_gpu.values())}
    most = max(by_gpu, key=by_gpu.__getitem__)
    return metrics | ({f"gpu/{name}/worst": most} if by_gpu[most] else {})

"""Aggregate the readings of all GPUs of a run into a few metrics.

gpu/<quantity>/mean, min, max   over all GPUs
gpu/<quantity>/worst            `<node> GPU <index>` with the lowest `util` or `power_w` (a GPU
                                that waits or is throttled), else with the highest value
gpu/<errors>/sum                errors since the last step; `worst` if there are any
gpu/num_gpus                    number of GPUs that were read
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.report.gpu.nvml_reader import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.gpu.sampler import GpuSummary

QUANTITIES = ("util", "memory_gib", "power_w", "temperature_c")
LOWER_IS_WORSE = ("util", "power_w")


def aggregate_gpu_metrics(by_node: Mapping[str, Sequence[GpuSummary]]) -> dict[str, float | str]:
    """Return the metrics of a step; empty without GPUs.

    Args:
        by_node: GPU summaries by node name.
    """
    values: dict[str, dict[str, float]] = {}
    num_gpus = 0
    for node, summaries in by_node.items():
        num_gpus += len(summaries)
        for summary in summaries:
            for name, value in summary.values.items():
                values.setdefault(name, {})[f"{node} GPU {summary.index}"] = value
    if not num_gpus:
        return {}
    metrics: dict[str, float | str] = {"gpu/num_gpus": float(num_gpus)}
    for name in QUANTITIES:
        if name in values:
            metrics |= _min_mean_max(name, values[name])
    for name in COUNTERS:
        if name in values:
            metrics |= _error_metrics(name, values[name])
    return metrics


def _min_mean_max(name: str, by_gpu: Mapping[str, float]) -> dict[str, float | str]:
    least, most = min(by_gpu, key=by_gpu.__getitem__), max(by_gpu, key=by_gpu.__getitem__)
    return {
        f"gpu/{name}/mean": sum(by_gpu.values()) / len(by_gpu),
        f"gpu/{name}/min": by_gpu[least],
        f"gpu/{name}/max": by_gpu[most],
        f"gpu/{name}/worst": least if name in LOWER_IS_WORSE else most,
    }


def _error_metrics(name: str, by_gpu: Mapping[str, float]) -> dict[str, float | str]:
    metrics: dict[str, float | str] = {f"gpu/{name}/sum": sum(by_gpu.values())}
    most = max(by_gpu, key=by_gpu.__getitem__)
    return metrics | ({f"gpu/{name}/worst": most} if by_gpu[most] else {})

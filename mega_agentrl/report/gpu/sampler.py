"""Sample the GPUs of a machine in a background thread and summarize the time between two calls.

The thread waits for the driver, whose calls take milliseconds. `collect` does not wait for a
reading, `close` waits for the one in progress. `aggregate_gpu_metrics` reduces the summaries of all
GPUs of a run to a few metrics:

gpu/<quantity>/mean, min, max   over all GPUs
gpu/<quantity>/worst            `<node> GPU <index>` with the lowest `util` or `power_w` (a GPU
                                that waits or is throttled), else with the highest value
gpu/<errors>/sum                errors since the last step; `worst` if there are any
gpu/num_gpus                    number of GPUs that were read
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.report.gpu.nvml_reader import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.gpu.nvml_reader import GpuReading, NvmlReader

SAMPLE_INTERVAL_S = 2.0
MAX_QUANTITIES = ("memory_gib", "temperature_c")
"""Quantities that are summarized by their maximum instead of their mean."""
QUANTITIES = ("util", "memory_gib", "power_w", "temperature_c")
LOWER_IS_WORSE = ("util", "power_w")


@dataclass(slots=True, kw_only=True)
class GpuSummary:
    """Summary of a GPU over an interval."""

    index: int
    """Index of the GPU in NVML."""
    values: dict[str, float] = field(default_factory=dict)
    """By quantity of `GpuReading`: the maximum of `MAX_QUANTITIES`, the increase of counters, the
    mean of all others."""


class _GpuWindow:
    """Readings of a GPU since the last summary."""

    def __init__(self) -> None:
        self._readings: dict[str, list[float]] = {}
        self._counter_starts: dict[str, float] = {}  # values at the last summary

    def add_reading(self, reading: GpuReading) -> None:
        for name, value in reading.items():
            if name in COUNTERS:
                self._counter_starts.setdefault(name, value)
            self._readings.setdefault(name, []).append(value)

    def pop_summary(self) -> dict[str, float]:
        values = {
            name: self._aggregate(name, readings) for name, readings in self._readings.items()
        }
        self._readings = {}
        return values

    def _aggregate(self, name: str, readings: list[float]) -> float:
        if name in COUNTERS:
            before, self._counter_starts[name] = self._counter_starts[name], readings[-1]
            # A driver reset restarts the counter at 0.
            return max(0.0, readings[-1] - before)
        return max(readings) if name in MAX_QUANTITIES else sum(readings) / len(readings)


class GpuSampler:
    """Samples the GPUs until it is closed, and closes the reader."""

    def __init__(self, reader: NvmlReader, interval_s: float = SAMPLE_INTERVAL_S) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._gpus = [_GpuWindow() for _ in range(reader.num_gpus)]
        self._lock = threading.Lock()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu sampler", daemon=True)
        self._sample()
        self._thread.start()

    def collect(self) -> list[GpuSummary]:
        """Return a summary of each GPU since the last call, except for GPUs without a reading."""
        with self._lock:
            windows = [gpu.pop_summary() for gpu in self._gpus]
        return [GpuSummary(index=i, values=values) for i, values in enumerate(windows) if values]

    def close(self) -> None:
        """Stop the thread; safe to call twice."""
        if not self._stop_event.is_set():
            self._stop_event.set()
            self._thread.join()
            self._reader.close()

    def _run(self) -> None:
        while not self._stop_event.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        readings = self._reader.read()
        with self._lock:
            for gpu, reading in zip(self._gpus, readings, strict=True):
                gpu.add_reading(reading)


def aggregate_gpu_metrics(by_node: Mapping[str, Sequence[GpuSummary]]) -> dict[str, float | str]:
    """Return the metrics of a step from the summaries of each node; empty without GPUs."""
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
    lowest, highest = min(by_gpu, key=by_gpu.__getitem__), max(by_gpu, key=by_gpu.__getitem__)
    return {
        f"gpu/{name}/mean": sum(by_gpu.values()) / len(by_gpu),
        f"gpu/{name}/min": by_gpu[lowest],
        f"gpu/{name}/max": by_gpu[highest],
        f"gpu/{name}/worst": lowest if name in LOWER_IS_WORSE else highest,
    }


def _error_metrics(name: str, by_gpu: Mapping[str, float]) -> dict[str, float | str]:
    metrics: dict[str, float | str] = {f"gpu/{name}/sum": sum(by_gpu.values())}
    worst = max(by_gpu, key=by_gpu.__getitem__)
    return metrics | ({f"gpu/{name}/worst": worst} if by_gpu[worst] else {})

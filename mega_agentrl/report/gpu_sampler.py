"""Reads the GPUs of a machine every few seconds, and sums up the time between two questions.

Consumes readings in a thread of its own, produces `GpuSummary`s. Waits for the driver, whose calls
take milliseconds; `take` waits for nobody, `close` for the reading under way.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.report.gpu_reader import COUNTERS

if TYPE_CHECKING:
    from mega_agentrl.report.gpu_reader import GpuReader, Reading

INTERVAL_S = 2.0
PEAKS = ("memory_gib", "temperature_c")
"""Quantities whose highest reading counts; of the others the mean does."""


@dataclass(slots=True, kw_only=True)
class GpuSummary:
    """A GPU over some time. values: by quantity as of `gpu_reader.Reading`: the highest of
    `PEAKS`, what counters rose by, the mean of the others.
    """

    index: int
    values: dict[str, float] = field(default_factory=dict)


class _Gpu:
    """What is known of one GPU since the last question."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        self._counted: dict[str, float] = {}  # at the last question

    def add(self, reading: Reading) -> None:
        for name, value in reading.items():
            if name in COUNTERS:
                self._counted.setdefault(name, value)
            self._seen.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        values = {name: self._sum_up(name, seen) for name, seen in self._seen.items()}
        self._seen = {}
        return values

    def _sum_up(self, name: str, seen: list[float]) -> float:
        if name in COUNTERS:
            before, self._counted[name] = self._counted[name], seen[-1]
            # A driver that was reset counts from 0 again.
            return max(0.0, seen[-1] - before)
        return max(seen) if name in PEAKS else sum(seen) / len(seen)


class GpuSampler:
    """Samples until it is closed, and closes the reader with it."""

    def __init__(self, reader: GpuReader, interval_s: float = INTERVAL_S) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._gpus = [_Gpu() for _ in range(reader.num_gpus)]
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu sampler", daemon=True)
        self._sample()
        self._thread.start()

    def take(self) -> list[GpuSummary]:
        """The time since the last call, by GPU; a GPU without a reading since then is left out."""
        with self._lock:
            taken = [gpu.take() for gpu in self._gpus]
        return [GpuSummary(index=i, values=values) for i, values in enumerate(taken) if values]

    def close(self) -> None:
        """End the thread; safe to call twice."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            self._reader.close()

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        readings = self._reader.read()
        with self._lock:
            for gpu, reading in zip(self._gpus, readings, strict=True):
                gpu.add(reading)

"""Protocols of the monitors of a run: metric trackers, GPU and memory use.

`runtime.build` opens the monitors before the run starts; the training loop reports to them or
reads them. All of them are optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Tracker(Protocol):
    """A metrics backend, opened and closed by `report.trackers.factory`."""

    run_id: str
    """Id under which the backend continues the run after a restart; empty if it needs none."""

    def log_config(self, settings: Mapping[str, object], text: str) -> None:
        """Record the run's settings.

        Args:
            settings: values by dotted key.
            text: the same settings as yaml.
        """

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Record the metrics of a step; each stage counts its steps from 1."""

    def close(self) -> None:
        """Flush pending metrics and close; safe to call twice."""


class GpuMonitor(Protocol):
    """Samples all GPUs of the run in the background."""

    def collect(self) -> Mapping[str, float | str]:
        """Return metrics of the time since the last call; empty without GPUs.

        Never raises and waits at most one second: samples that arrive later count for the next
        call.
        """


class DriverMonitor(Protocol):
    """Watches the driver's process in the background."""

    def collect(self) -> Mapping[str, float]:
        """Return metrics of the time since the last call; never raises or waits."""


class MemoryMonitor(Protocol):
    """Reads the memory use of the run's processes."""

    def collect(self) -> Mapping[str, float]:
        """Return the peaks so far; never raises and waits at most one second."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Monitors:
    """Everything that observes a run."""

    trackers: Sequence[Tracker] = ()
    """Metrics backends in addition to `metrics.jsonl`."""
    gpu: GpuMonitor | None = None
    memory: MemoryMonitor | None = None
    driver: DriverMonitor | None = None
    rollout_spans: Any = None
    """A `rollout.tracing.RolloutSpans`, which traces single trajectories, or None."""
    gpu_name: str = ""
    """CUDA device name of the policy's ranks; empty on CPUs."""

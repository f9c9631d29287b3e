"""The eyes on a run: what `runtime.build` opens before it starts, and the loop then tells or asks.

`Tracker` takes the metrics of each step, `GpuWatch` gives what the GPUs did since the last one,
`MemoryWatch` what policy and engines have taken, `spans` (a `rollout.spans.RolloutSpans`) follows
single trajectories. Everything may be absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Tracker(Protocol):
    """One place for metrics; opened and closed by `report.trackers.open`.

    run_id: what it calls the run, to go on with it after a restart; empty where a run needs none.
    """

    run_id: str

    def configure(self, settings: Mapping[str, object], text: str) -> None:
        """Note the run's settings: by dotted key, and as the yaml text they are kept as."""

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Note the numbers of a step. Each stage counts its steps from 1."""

    def close(self) -> None:
        """Write what is left; safe to call twice."""


class GpuWatch(Protocol):
    """Looks at all GPUs of the run from the side."""

    def take(self) -> Mapping[str, float | str]:
        """Metrics of the time since the last call; empty without GPUs. Never raises, and waits a
        second at most: what comes later counts for the next call.
        """


class MemoryWatch(Protocol):
    """Knows what the processes of the run have taken of memory."""

    def take(self) -> Mapping[str, float]:
        """Metrics, the peaks so far. Never raises, and waits a second at most."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Watch:
    """What looks at a run. gpu_name: of the policy's ranks as CUDA calls it; empty on CPUs."""

    trackers: Sequence[Tracker] = ()
    gpus: GpuWatch | None = None
    memory: MemoryWatch | None = None
    spans: Any = None
    gpu_name: str = ""

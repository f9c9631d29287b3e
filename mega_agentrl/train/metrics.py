"""Metrics of a run: one JSON line a step, trackers beside it, and the clock of the phases.

`metrics.jsonl` holds ``{"step": int, "stage": str, "<name>": float, ...}``. Names are
``area/what``; seconds are under ``time/``. A few values are words, which trackers do not get.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.types.watch import Tracker


class PhaseClock:
    """Seconds per named phase since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the body under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds by phase, and start over."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class MetricWriter:
    """Appends to `metrics.jsonl` and tells trackers, which somebody else closes."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._trackers = trackers

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def write(self, stage: str, step: int, metrics: Mapping[str, float | str]) -> None:
        """One line; a value that is no finite number is written as it is, never dropped."""
        self._file.write(json.dumps({"stage": stage, "step": step, **metrics}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        for tracker in self._trackers:
            tracker.log(stage, step, numbers)

"""Write metrics, one JSON line per step, pass them to trackers, and time the phases of a step.

`metrics.jsonl` holds ``{"step": int, "stage": str, "<name>": float, ...}``. Names are
``area/name``; seconds are under ``time/``. A few values are strings, which trackers do not get.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.types.monitoring import Tracker


class PhaseTimer:
    """Seconds per named phase since the last `pop_seconds`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the body to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds by phase, and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class MetricWriter:
    """Appends to `metrics.jsonl` and passes numbers to the trackers, which the caller closes."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._trackers = trackers

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def write(self, stage: str, step: int, metrics: Mapping[str, float | str]) -> None:
        """Write one line. Non-finite values are written, too, never dropped."""
        self._file.write(json.dumps({"stage": stage, "step": step, **metrics}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        for tracker in self._trackers:
            tracker.log(stage, step, numbers)

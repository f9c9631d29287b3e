"""Metrics of a run: one JSON line a step, TensorBoard beside it, and the clock of the phases.

`metrics.jsonl` holds ``{"step": int, "stage": str, "<name>": float, ...}``. Names are
``area/what``; seconds are under ``time/``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """Appends to `metrics.jsonl` and, if asked, to TensorBoard event files."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """One line; a value that is no finite number is written as it is, never dropped."""
        self._file.write(json.dumps({"stage": stage, "step": step, **metrics}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"{stage}/{name}", value, step)

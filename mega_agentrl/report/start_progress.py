"""Prints what the start of a run waits for, and how long each stage took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mega_agentrl.report.progress import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable


class StartProgress:
    """Prints a line at the beginning of each stage of a start, and the times of all at its end.

    Args:
        elapsed_s: seconds that earlier stages of the start have taken.
        clock: returns the time in seconds.
    """

    def __init__(self, elapsed_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock() - elapsed_s
        self._stage: tuple[str, float] | None = None
        self._seconds: dict[str, float] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning of the start."""
        return self._clock() - self._start_s

    def begin(self, name: str, waits_for: str = "") -> None:
        """End the previous stage, and print the name of the next one and what it waits for."""
        self._end_stage()
        self._stage = name, self._clock()
        detail = f" ({waits_for})" if waits_for else ""
        print(f"start {format_duration(self.elapsed_s)}  {name}{detail} ...", flush=True)

    def note(self, text: str) -> None:
        """Print a line within the current stage."""
        print(f"start {format_duration(self.elapsed_s)}  {text}", flush=True)

    def finish(self) -> None:
        """End the last stage and print the seconds of all stages."""
        self._end_stage()
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())
        print(f"start took {format_duration(self.elapsed_s)}: {parts}", flush=True)

    def _end_stage(self) -> None:
        if self._stage is not None:
            name, began_s = self._stage
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began_s
            self._stage = None

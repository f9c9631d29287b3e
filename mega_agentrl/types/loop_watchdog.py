"""Measures how long an event loop stands still, and names the code that holds it.

A thread asks the loop for an answer a few times a second. The time until the answer is a pause of
the loop: meanwhile it serves no engine, no tool and no request. Pauses shorter than the interval
may go unnoticed. A loop that is not running, as between two calls of `asyncio.Runner.run`, does not
stand still.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from types import FrameType

PING_INTERVAL_S = 0.25
"""Time between an answer of the loop and the next question; a question takes about 50 us."""
POLL_INTERVAL_S = 0.05
"""Interval at which a missing answer is looked at."""

LIBRARY_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of Python and of installed packages."""
STARVED = "no code of its own: other threads held the interpreter, or the machine is overloaded"


class LoopWatchdog:
    """Watches one event loop from `start` to `close`.

    Args:
        loop: The watched loop.
        thread: The thread that runs it.
        limit_s: Length of a pause from which `report` is called.
        report: Called with the place at which the loop stands, once for each place.
        excluded_folders: Folders of code that is only named if no other code has called it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        *,
        limit_s: float,
        report: Callable[[str], None],
        excluded_folders: Sequence[str] = LIBRARY_FOLDERS,
    ) -> None:
        self._loop, self._loop_thread = loop, thread
        self._limit_s, self._report = limit_s, report
        self._excluded_folders = tuple(excluded_folders)
        self._reported_places: set[str] = set()
        self._is_closing = threading.Event()
        self._asked_at_s: float | None = None
        self._longest_pause_s = 0.0
        # A daemon thread, because a loop that is blocked for ever must not block the exit.
        self._thread = threading.Thread(
            target=self._watch, name=f"{thread.name}-watchdog", daemon=True
        )

    def __enter__(self) -> LoopWatchdog:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._is_closing.set()

    def pop_longest_pause(self) -> float:
        """Return the longest pause in seconds since the last call, one that lasts included."""
        longest_s, self._longest_pause_s = self._longest_pause_s, 0.0
        asked_at_s = self._asked_at_s
        return longest_s if asked_at_s is None else max(longest_s, time.monotonic() - asked_at_s)

    def _watch(self) -> None:
        while not self._is_closing.wait(min(PING_INTERVAL_S, self._limit_s)):
            if self._loop.is_running():
                with suppress(RuntimeError):  # the loop was closed in the meantime
                    self._wait_for_answer()
                self._asked_at_s = None

    def _wait_for_answer(self) -> None:
        """Measure one answer, unless the loop ends before it comes."""
        answered = threading.Event()
        answered_at_s: list[float] = []

        def answer() -> None:
            answered_at_s.append(time.monotonic())
            answered.set()

        asked_at_s = self._asked_at_s = time.monotonic()
        self._loop.call_soon_threadsafe(answer)
        is_reported = False
        while not answered.wait(min(POLL_INTERVAL_S, self._limit_s)):
            if self._is_closing.is_set() or not self._loop.is_running():
                return
            if not is_reported and time.monotonic() - asked_at_s > self._limit_s:
                is_reported = True
                self._report_place()
        self._longest_pause_s = max(self._longest_pause_s, answered_at_s[0] - asked_at_s)

    def _report_place(self) -> None:
        frame = find_frame(self._loop_thread, self._excluded_folders)
        place = STARVED if frame is None else describe_frame(frame)
        if place not in self._reported_places:
            self._reported_places.add(place)
            self._report(place)


def find_frame(thread: threading.Thread, excluded_folders: Sequence[str]) -> FrameType | None:
    """Return the innermost frame of what the loop of a thread runs, outside of these folders.

    If all of it lies in these folders, the innermost frame is returned; None if the loop waits for
    events.
    """
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    excluded = (*excluded_folders, "<")
    while frame is not None and frame.f_code.co_name != "_run_once":
        if not frame.f_code.co_filename.startswith(excluded):
            return frame
        frame = frame.f_back
    if innermost is None or innermost.f_code.co_name in ("select", "_run_once"):
        return None
    return innermost


def describe_frame(frame: FrameType) -> str:
    """Return file, line, function and code of a frame."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, line).strip()
    return f"{file}:{line} in {frame.f_code.co_name}: {code}"

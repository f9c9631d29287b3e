"""Recognises user code that fails on all of its first calls, which ends the run.

A tool or a reward function that fails now and then costs trajectories; one that fails whenever it
is called has an error in its code, and the run would only learn from the rest. `FirstCalls` watches
one function. The calls that are started first decide, not those that end first, because a failing
call is often faster than a working one.
"""

from __future__ import annotations

import threading
import traceback

from mega_agentrl.types.errors import FirstCallsFailedError


class FirstCalls:
    """Outcomes of the first calls of a function; safe to use from several threads.

    Args:
        name: what is called, for the message: `tool notes` or `reward function mine`.
        source: where its code is: a file or an import path.
        limit: number of first calls of which one must succeed; 0 disables the check.
    """

    def __init__(self, name: str, source: str, limit: int) -> None:
        self._name = name
        self._source = source
        self._limit = limit
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_first = limit
        self._failed_calls: set[int] = set()
        self._is_decided = limit == 0

    def start(self) -> int:
        """Return the number of a call that starts now."""
        with self._lock:
            self._num_started += 1
            return self._num_started - 1

    def record_success(self) -> None:
        """Record that a call succeeded, which ends the watch."""
        with self._lock:
            self._is_decided = True
            self._failed_calls.clear()

    def record_no_outcome(self, call: int) -> None:
        """Record that a call neither succeeded nor failed; the next call counts in its place."""
        with self._lock:
            self._num_first += call < self._num_first

    def record_failure(self, call: int, error: str, location: str) -> None:
        """Record that a call failed.

        Args:
            call: what `start` returned.
            error: type and text of the exception.
            location: last line of its traceback; empty if there is none.

        Raises:
            FirstCallsFailedError: all of the first calls have failed.
        """
        with self._lock:
            if self._is_decided:
                return
            self._failed_calls.add(call)
            num_failed = sum(number < self._num_first for number in self._failed_calls)
            if num_failed < self._limit:
                return
        raise FirstCallsFailedError(
            name=self._name,
            source=self._source,
            num_calls=self._limit,
            error=error,
            location=location,
        )


def last_traceback_line(error: BaseException) -> str:
    """Return file, line, function and code where an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"

"""A limit on calls per second, over all threads and event loops of the process.

A caller reserves the next free start and sleeps until then; unblocked by the clock or by its
cancellation, whose start is lost. A start that lies beyond the caller's patience is not
reserved but refused at once, so that a jam cannot hold starts for callers who have long left.
"""

from __future__ import annotations

import asyncio
import threading
import time


class PaceError(RuntimeError):
    """No free start within the caller's patience."""


class Pace:
    """calls_per_second: evenly spread; 0 is no limit, but `pause` holds nevertheless."""

    def __init__(self, calls_per_second: float) -> None:
        self._gap_s = 1 / calls_per_second if calls_per_second else 0.0
        self._lock = threading.Lock()
        self._next_s = 0.0

    async def wait(self, patience_s: float) -> None:
        """Wait for one's start; raises `PaceError` where it is more than `patience_s` away."""
        with self._lock:
            now_s = time.monotonic()
            wait_s = max(0.0, self._next_s - now_s)
            if wait_s > patience_s:
                raise PaceError(
                    f"the next free start is {wait_s:.3g} s away, expected at most "
                    f"{patience_s:.3g} s; probable cause: more calls than the limit per second "
                    "allows, or a server that asked for a pause"
                )
            self._next_s = now_s + wait_s + self._gap_s
        if wait_s:
            await asyncio.sleep(wait_s)

    def pause(self, pause_s: float) -> None:
        """Let nobody start for that long."""
        with self._lock:
            self._next_s = max(self._next_s, time.monotonic() + pause_s)

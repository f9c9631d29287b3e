"""A limit on calls per second over all threads and event loops of the process.

A caller reserves the next free start time and sleeps until then; the start of a cancelled caller is
lost. A start time beyond the caller's maximum wait is refused at once instead of reserved, so that
a backlog cannot hold start times for callers that have long given up.
"""

from __future__ import annotations

import asyncio
import threading
import time


class RateLimitError(RuntimeError):
    """There is no free start time within the caller's maximum wait."""


class RateLimiter:
    """Spreads calls evenly over time.

    Args:
        calls_per_second: the limit, 0 for none; `pause` applies nevertheless.
    """

    def __init__(self, calls_per_second: float) -> None:
        self._interval_s = 1 / calls_per_second if calls_per_second else 0.0
        self._lock = threading.Lock()
        self._next_start_s = 0.0

    async def acquire(self, max_wait_s: float) -> None:
        """Wait for the next start; raises `RateLimitError` if it is more than `max_wait_s` away."""
        with self._lock:
            now_s = time.monotonic()
            wait_s = max(0.0, self._next_start_s - now_s)
            if wait_s > max_wait_s:
                raise RateLimitError(
                    f"the next free start time is {wait_s:.3g} s away, expected at most "
                    f"{max_wait_s:.3g} s; probable cause: more calls than the limit per second "
                    "allows, or a server that asked for a pause"
                )
            self._next_start_s = now_s + wait_s + self._interval_s
        if wait_s:
            await asyncio.sleep(wait_s)

    def pause(self, pause_s: float) -> None:
        """Let no call start for `pause_s`."""
        with self._lock:
            self._next_start_s = max(self._next_start_s, time.monotonic() + pause_s)

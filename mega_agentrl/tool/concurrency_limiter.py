"""A limit on concurrent work over all event loops of the process.

(`asyncio.Semaphore` belongs to one loop.)
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future


class ConcurrencyLimiter:
    """A semaphore of `limit` slots, None for no limit.

    Slots have no owner: whoever acquired one releases it, from any thread.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrent={limit}: expected at least 1, or None for no limit")
        self._lock = threading.Lock()
        self._num_free = limit
        self._waiters: deque[Future[None]] = deque()

    async def acquire(self, timeout_s: float | None) -> None:
        """Take a slot, in order of arrival; raises `TimeoutError` if none becomes free in time."""
        waiter: Future[None] = Future()
        with self._lock:
            if self._num_free is None:
                return
            if self._num_free:
                self._num_free -= 1
                return
            self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(waiter)
        except (TimeoutError, asyncio.CancelledError):
            # The slot arrived just now: pass it on.
            if not waiter.cancel():
                self.release()
            raise

    def release(self) -> None:
        """Return a slot; it goes to the caller that has waited longest."""
        with self._lock:
            if self._num_free is None:
                return
            while self._waiters:
                waiter = self._waiters.popleft()
                if waiter.set_running_or_notify_cancel():
                    break
            else:
                self._num_free += 1
                return
        waiter.set_result(None)

"""A limit on how much of something runs at once, over all event loops of the process.

`take` waits in order of arrival for a free slot; unblocked by a `give`, by its deadline, or by
cancellation. Slots belong to nobody: whoever took one gives it back, from any thread.
(`asyncio.Semaphore` belongs to one loop.)
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future


class Slots:
    """`limit` slots; None: as many as are asked for."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrent={limit}: expected at least 1, or none for no limit")
        self._lock = threading.Lock()
        self._num_free = limit
        self._waiting: deque[Future[None]] = deque()

    async def take(self, deadline_s: float | None) -> None:
        """Take one; raises `TimeoutError` where none became free in time."""
        waiter: Future[None] = Future()
        with self._lock:
            if self._num_free is None:
                return
            if self._num_free:
                self._num_free -= 1
                return
            self._waiting.append(waiter)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(waiter)
        except (TimeoutError, asyncio.CancelledError):
            # Handed over at the very moment: it goes to the next one.
            if not waiter.cancel():
                self.give()
            raise

    def give(self) -> None:
        """Give one back; it goes to the longest waiting."""
        with self._lock:
            if self._num_free is None:
                return
            while self._waiting:
                waiter = self._waiting.popleft()
                if waiter.set_running_or_notify_cancel():
                    break
            else:
                self._num_free += 1
                return
        waiter.set_result(None)

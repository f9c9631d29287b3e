"""Shares one run of equal concurrent work over all threads and event loops of the process.

The first caller starts the work as its own task, and every caller waits for its result. The work
must have its own deadline. A cancelled caller leaves the work to the others.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ResultT = TypeVar("ResultT")


class SingleFlight(Generic[ResultT]):
    """Runs work by key, at most once at a time per key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[ResultT]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, key: str, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of the work in progress for that key, else of `work()`.

        Raises:
            RuntimeError: the event loop that ran the work ended first. Errors of the work are
                passed on.
        """
        with self._lock:
            future = self._futures.get(key)
            first = future is None
            if future is None:
                future = self._futures[key] = Future()
        if first:
            task = asyncio.ensure_future(self._run_shared(key, future, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def _run_shared(
        self, key: str, future: Future[ResultT], work: Callable[[], Awaitable[ResultT]]
    ) -> None:
        failure: BaseException | None = None
        try:
            result = await work()
        except asyncio.CancelledError:
            failure = RuntimeError("the event loop that ran the work has ended")
            raise
        except Exception as error:  # noqa: BLE001  raised to every waiting caller
            failure = error
        finally:
            with self._lock:
                del self._futures[key]
            if failure is not None:
                future.set_exception(failure)
        if failure is None:
            future.set_result(result)

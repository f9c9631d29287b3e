"""Equal questions at the same time are asked once, over all threads and loops of the process.

The first one starts the work as a task of its own; everybody waits for its result. Waits for
the work, which has its own deadline; unblocked by its end, its failure, or the caller's own
cancellation, which leaves the work to the others.
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
    """Work by key, as long as it is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[str, Future[ResultT]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, key: str, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The result of the work under way for that key, else of `work()`.

        Raises what the work raises, `RuntimeError` where the loop it ran on ended first.
        """
        with self._lock:
            flight = self._flights.get(key)
            first = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if first:
            task = asyncio.ensure_future(self._fly(key, flight, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(asyncio.wrap_future(flight))

    async def _fly(
        self, key: str, flight: Future[ResultT], work: Callable[[], Awaitable[ResultT]]
    ) -> None:
        outcome: BaseException | None = None
        try:
            result = await work()
        except asyncio.CancelledError:
            outcome = RuntimeError("the loop that asked has ended")
            raise
        except Exception as error:  # noqa: BLE001  handed to everybody who waits
            outcome = error
        finally:
            with self._lock:
                del self._flights[key]
            if outcome is not None:
                flight.set_exception(outcome)
        if outcome is None:
            flight.set_result(result)

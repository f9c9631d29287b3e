"""An asyncio event loop in its own thread, which keeps running while the main thread is busy.

Asynchronous runs (`rollout.max_staleness`) execute their rollouts as tasks on this loop; the main
thread, which receives signals, waits for single tasks. Synchronous runs use an `asyncio.Runner`
instead, whose loop only runs during a wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType

ResultT = TypeVar("ResultT")

_LOOP_CLOSE_TIMEOUT_S = 10.0
_logger = logging.getLogger(__name__)


class EventLoopThread:
    """Context manager whose event loop runs from entry to exit."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._stop_event: asyncio.Event | None = None
        # A daemon thread, so that a task that cannot be cancelled does not block the exit.
        self._thread = threading.Thread(target=self._run_loop, name="rollouts", daemon=True)

    def __enter__(self) -> EventLoopThread:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine to its end and return its result.

        Like `asyncio.Runner.run`, but tasks that the coroutine started keep running. If a signal
        handler raises in the main thread during the wait, the coroutine is cancelled and awaited
        before the exception propagates.
        """
        assert self._loop is not None, "the context must be entered first"
        assert threading.current_thread() is not self._thread, "the loop would wait for itself"
        loop, done_task = self._loop, Future[asyncio.Task[ResultT]]()
        tasks: list[asyncio.Task[ResultT]] = []

        def start() -> None:
            task = loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(done_task.set_result)

        loop.call_soon_threadsafe(start)
        try:
            task = done_task.result()
        except BaseException:
            # Runs after `start` on the loop, so the task exists.
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            _retrieve_exception(done_task.result())
            raise
        return task.result()

    def close(self) -> None:
        """Cancel the remaining tasks and end the thread; waits at most 10 s. Safe to call twice."""
        if self._loop is None or self._stop_event is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop_event.set)
        self._thread.join(_LOOP_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.warning(
                "rollouts did not end within %g s and are abandoned", _LOOP_CLOSE_TIMEOUT_S
            )

    def _run_loop(self) -> None:
        # At its end, `asyncio.run` cancels all tasks and waits for them and the executor's threads.
        asyncio.run(self._wait_for_stop())

    async def _wait_for_stop(self) -> None:
        self._loop, self._stop_event = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stop_event.wait()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Mark the task's exception as retrieved: another exception is raised instead."""
    if not task.cancelled():
        task.exception()

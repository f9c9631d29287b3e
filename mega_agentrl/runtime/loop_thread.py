"""An event loop in a thread of its own, which goes on while the main thread waits for others.

Of a run with `rollout.staleness`: its rollouts are tasks of this loop, and whoever waits for one,
or for an evaluation, waits in the main thread, where signals arrive. Without staleness the run
has an `asyncio.Runner` instead, whose loop stands still between two waits.

`run` waits for a coroutine; unblocked by its end. An exception that a signal's handler raises in
the main thread meanwhile cancels the coroutine, and is passed on once that has ended. `close`
cancels what is still running, waits for it `_CLOSE_DEADLINE_S`, and ends the thread.
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

_CLOSE_DEADLINE_S = 10.0
_logger = logging.getLogger(__name__)


class LoopThread:
    """A context manager; the loop runs from its beginning to its end."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._over: asyncio.Event | None = None
        # A daemon: a task that cannot be cancelled does not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The coroutine's result; as `asyncio.Runner.run`, but what it started goes on."""
        assert self._loop is not None, "it is entered before it is used"
        assert threading.current_thread() is not self._thread, "the loop would wait for itself"
        loop, ended = self._loop, Future[asyncio.Task[ResultT]]()
        started: list[asyncio.Task[ResultT]] = []

        def start() -> None:
            task = loop.create_task(coroutine)
            started.append(task)
            task.add_done_callback(ended.set_result)

        loop.call_soon_threadsafe(start)
        try:
            task = ended.result()
        except BaseException:
            # Behind `start`, so there is something to cancel.
            loop.call_soon_threadsafe(lambda: started[0].cancel())
            _forget_error(ended.result())
            raise
        return task.result()

    def close(self) -> None:
        """End the loop with all that is left in it; safe to call twice."""
        if self._loop is None or self._over is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            _logger.warning("rollouts did not end within %g s and are left", _CLOSE_DEADLINE_S)

    def _serve(self) -> None:
        # Its end cancels every task and waits for them and for the threads it lent out.
        asyncio.run(self._until_over())

    async def _until_over(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._is_up.set()
        await self._over.wait()


def _forget_error(task: asyncio.Task[Any]) -> None:
    """Another exception is passed on; asyncio is not to warn of this one."""
    if not task.cancelled():
        task.exception()

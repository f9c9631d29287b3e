"""The event loop of the agents, in a thread of its own.

Agents share the process with the gateway that answers them. On a loop and an executor of their own,
an agent that computes or blocks delays other agents, but not the engines, tools and the gateway.
Frameworks call synchronous tools in the executor. A watchdog names the line of an agent that holds
the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.types.loop_watchdog import LIBRARY_FOLDERS, LoopWatchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

ResultT = TypeVar("ResultT")

HOLD_LIMIT_S = 2.0
"""Time after which an agent that holds the loop is reported."""
MAX_THREADS = 256
"""Threads of the executor; they are started when they are needed."""

_CLOSE_TIMEOUT_S = 10.0
_PACKAGE_FOLDERS = (*LIBRARY_FOLDERS, str(Path(__file__).resolve().parents[2]))
"""Folders of code that is not the user's."""
_log = logging.getLogger(__name__)


class AgentLoop:
    """Context manager whose event loop runs from entry to exit.

    Args:
        num_threads: Maximum number of threads of its executor.
        hold_limit_s: Time after which an agent that holds the loop is reported.
    """

    def __init__(self, num_threads: int = MAX_THREADS, hold_limit_s: float = HOLD_LIMIT_S) -> None:
        self._loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="agent-tools")
        self._loop.set_default_executor(self._executor)
        self._hold_limit_s = hold_limit_s
        self._is_closing = threading.Event()
        # A daemon thread, so that an agent that blocks for ever does not block the exit.
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self.watchdog = LoopWatchdog(
            self._loop,
            self._thread,
            limit_s=hold_limit_s,
            report=self._report_hold,
            excluded_folders=_PACKAGE_FOLDERS,
        )
        """Measures how long agents hold the loop."""

    def __enter__(self) -> AgentLoop:
        self._thread.start()
        self.watchdog.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def run(self, function: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Run a coroutine function on this loop and return its result.

        Cancellation cancels it and waits for its end.

        Raises:
            RuntimeError: it called `sys.exit`, which would end the run.
        """
        caller = asyncio.get_running_loop()
        outcome: asyncio.Future[ResultT] = caller.create_future()
        tasks: list[asyncio.Task[ResultT]] = []

        def report(task: asyncio.Task[ResultT]) -> None:
            with suppress(RuntimeError):  # the caller's loop may have been closed
                caller.call_soon_threadsafe(_copy_outcome, task, outcome)

        def start() -> None:
            tasks.append(self._loop.create_task(_without_exit(function)))
            tasks[0].add_done_callback(report)

        self._loop.call_soon_threadsafe(start)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if not outcome.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                await asyncio.wait({outcome})
                _retrieve_exception(outcome)
            raise

    def close(self) -> None:
        """Cancel the remaining agents and end the thread; waits at most 10 s. Safe to call twice.

        Threads of the executor that still run are abandoned.
        """
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self.watchdog.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("agents did not end within %g s and are abandoned", _CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_closing.is_set():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that an agent started
                _log.warning("a task of an agent called sys.exit: %r; it is ignored", error)
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        with suppress(SystemExit, KeyboardInterrupt):
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S / 2))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _report_hold(self, place: str) -> None:
        _log.warning(
            "an agent has held the event loop of all agents for more than %g s at %s; probable "
            "cause: a blocking call in an `async` function; use its asynchronous form, or "
            "`await asyncio.to_thread(...)`",
            self._hold_limit_s,
            place,
        )


def _copy_outcome[ResultT](task: asyncio.Task[ResultT], outcome: asyncio.Future[ResultT]) -> None:
    """Pass on how a task of another loop has ended."""
    if task.cancelled():
        outcome.cancel()
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as retrieved: nobody waits for it any more."""
    if not future.cancelled():
        future.exception()


async def _without_exit[ResultT](function: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Return the result of a coroutine function; its exit ends the attempt, not the loop."""
    try:
        return await function()
    except SystemExit as error:
        raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error
    except KeyboardInterrupt as error:
        raise RuntimeError("the agent raised KeyboardInterrupt") from error

"""A thread for code that may block for ever.

The end of the process does not wait for it, unlike for the threads of `concurrent.futures`.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")


class DaemonThread:
    """Calls functions one after another, all in the same thread.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def call(self, function: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
        """Submit a function, and return a future of what it returns or raises.

        Cancellation abandons a running function, and removes one that waits.
        """
        future: Future[ResultT] = Future()
        self._calls.put((function, future))
        return asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the thread after the functions that have been submitted."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except StopIteration as error:  # asyncio's futures refuse it and stay pending
                future.set_exception(RuntimeError(f"StopIteration: {error}"))
            except BaseException as error:  # noqa: BLE001  the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

"""Several results that others work on as one future of what is made of them.

Consumes futures that other threads settle; the result is settled in the thread of the last one,
or of the first that fails. Cancelling the result cancels what it waits for. Waits for nothing.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")


def when_all(
    waiting: Mapping[str, Future[PartT]], make: Callable[[dict[str, PartT]], WholeT]
) -> Future[WholeT]:
    """What `make` makes of all results by name; the first error is the result's.

    A result that was cancelled is a `CancelledError`.
    """
    whole: Future[WholeT] = Future()
    lock = threading.Lock()
    missing = set(waiting)
    claimed = False

    def settle(name: str, one: Future[PartT]) -> None:
        nonlocal claimed
        with lock:
            missing.discard(name)
            error = CancelledError() if one.cancelled() else one.exception()
            if claimed or (error is None and missing):
                return
            claimed = True
        if not whole.set_running_or_notify_cancel():
            return
        if error is not None:
            whole.set_exception(error)
            return
        try:
            made = make({key: future.result() for key, future in waiting.items()})
        except Exception as wrong:  # noqa: BLE001  the edge of a thread: else nobody would see it
            whole.set_exception(wrong)
        else:
            whole.set_result(made)

    for name, one in waiting.items():
        one.add_done_callback(partial(settle, name))
    whole.add_done_callback(lambda future: _cancel(waiting) if future.cancelled() else None)
    return whole


def _cancel(waiting: Mapping[str, Future[Any]]) -> None:
    for future in waiting.values():
        future.cancel()

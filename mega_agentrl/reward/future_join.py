"""Joins several futures into one.

The joined future is resolved in the thread that resolves the last input, or the first that fails.
Cancelling it cancels the inputs. Nothing here blocks.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


def gather_futures(
    futures: Mapping[str, Future[InputT]], make: Callable[[dict[str, InputT]], ResultT]
) -> Future[ResultT]:
    """Return the future of `make(results by name)`.

    The first error of an input becomes the error of the joined future; a cancelled input counts as
    `CancelledError`.
    """
    joined: Future[ResultT] = Future()
    lock = threading.Lock()
    missing = set(futures)
    is_resolved = False

    def on_done(name: str, one: Future[InputT]) -> None:
        nonlocal is_resolved
        with lock:
            missing.discard(name)
            error = CancelledError() if one.cancelled() else one.exception()
            if is_resolved or (error is None and missing):
                return
            is_resolved = True
        if not joined.set_running_or_notify_cancel():
            return
        if error is not None:
            joined.set_exception(error)
            return
        try:
            result = make({key: future.result() for key, future in futures.items()})
        except Exception as make_error:  # noqa: BLE001  a callback: the error would be lost
            joined.set_exception(make_error)
        else:
            joined.set_result(result)

    for name, one in futures.items():
        one.add_done_callback(partial(on_done, name))
    joined.add_done_callback(lambda future: _cancel_all(futures) if future.cancelled() else None)
    return joined


def _cancel_all(futures: Mapping[str, Future[Any]]) -> None:
    for future in futures.values():
        future.cancel()

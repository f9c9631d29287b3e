"""A hard deadline for somebody else's coroutine.

Consumes a coroutine, produces its result. Waits for it in a task of its own; unblocked by its
end, by the deadline, or by cancellation. After the latter two the task is cancelled and gets
`GRACE_S` to end; one that does not end is left behind, so that no tool can hold a trajectory.
What a late task still produces is handed to `undo`. Kills no thread: a blocked thread goes on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

GRACE_S = 0.2

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)
_left_behind: set[asyncio.Task[Any]] = set()
"""Keeps the tasks nobody waits for from being collected."""


class DeadlinePassedError(Exception):
    """The work was not done in time."""


async def within(
    work: Coroutine[Any, Any, ResultT],
    deadline_s: float | None,
    *,
    undo: Callable[[ResultT], Awaitable[None]] | None = None,
    on_end: Callable[[], None] | None = None,
) -> ResultT:
    """The work's result; raises what it raises, `DeadlinePassedError` after `deadline_s`.

    undo: takes a result that came after the deadline or a cancellation. on_end: called once
    when the work has really ended, which may be after this has returned.
    Raises `RuntimeError` where the work cancelled itself.
    """
    task = asyncio.ensure_future(work)
    if on_end is not None:
        task.add_done_callback(lambda _: on_end())
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        await _give_up(task, undo)
        raise
    if not task.done():
        await _give_up(task, undo)
        raise DeadlinePassedError(f"not done within {deadline_s:g} s")
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


async def _give_up(
    task: asyncio.Task[ResultT], undo: Callable[[ResultT], Awaitable[None]] | None
) -> None:
    """Cancel the task, and undo what it makes nevertheless."""
    if not task.done():
        task.cancel()
    ending = asyncio.ensure_future(_end(task, undo))
    _left_behind.add(ending)
    ending.add_done_callback(_left_behind.discard)
    await asyncio.wait({ending}, timeout=GRACE_S)


async def _end(
    task: asyncio.Task[ResultT], undo: Callable[[ResultT], Awaitable[None]] | None
) -> None:
    await asyncio.wait({task})
    if task.cancelled():
        return
    if error := task.exception():
        _log.debug("given up, then failed: %r", error)
    elif undo is not None:
        await undo(task.result())

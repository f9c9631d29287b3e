"""A hard deadline for a coroutine that may not honour cancellation.

The coroutine runs in its own task. After the deadline, or when the caller is cancelled, the task is
cancelled and gets `CANCEL_GRACE_S` to end; a task that does not end is abandoned, so that no tool
can hold up a trajectory. A blocked thread cannot be killed and goes on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

CANCEL_GRACE_S = 0.2


_log = logging.getLogger(__name__)
_abandoned_tasks: set[asyncio.Task[Any]] = set()
"""Strong references, so that abandoned tasks are not garbage-collected."""


class DeadlineExceededError(Exception):
    """The work exceeded its time limit."""


async def run_with_deadline[ResultT](
    work: Coroutine[Any, Any, ResultT],
    timeout_s: float | None,
    *,
    undo: Callable[[ResultT], Awaitable[None]] | None = None,
    on_end: Callable[[], None] | None = None,
) -> ResultT:
    """Return the result of `work`; raises what it raises.

    Args:
        work: the coroutine to run.
        timeout_s: time limit of the work, None for no limit.
        undo: called with a result that came after the deadline or a cancellation.
        on_end: called once when the work has really ended, perhaps after this has returned.

    Raises:
        DeadlineExceededError: the work took longer than `timeout_s`.
        RuntimeError: the work cancelled itself.
    """
    task = asyncio.ensure_future(work)
    if on_end is not None:
        task.add_done_callback(lambda _: on_end())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _cancel_and_undo(task, undo)
        raise
    if not task.done():
        await _cancel_and_undo(task, undo)
        raise DeadlineExceededError(f"not done within {timeout_s:g} s")
    if task.cancelled():
        raise RuntimeError("the work cancelled itself")
    return task.result()


async def _cancel_and_undo[ResultT](
    task: asyncio.Task[ResultT], undo: Callable[[ResultT], Awaitable[None]] | None
) -> None:
    """Cancel the task, and undo its result if it ends with one nevertheless."""
    if not task.done():
        task.cancel()
    cleanup = asyncio.ensure_future(_wait_and_undo(task, undo))
    _abandoned_tasks.add(cleanup)
    cleanup.add_done_callback(_abandoned_tasks.discard)
    await asyncio.wait({cleanup}, timeout=CANCEL_GRACE_S)


async def _wait_and_undo[ResultT](
    task: asyncio.Task[ResultT], undo: Callable[[ResultT], Awaitable[None]] | None
) -> None:
    await asyncio.wait({task})
    if task.cancelled():
        return
    if error := task.exception():
        _log.debug("a task failed after its deadline: %r", error)
    elif undo is not None:
        await undo(task.result())

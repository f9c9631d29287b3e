"""Deadlines hold against work that does not want to end, and late results are undone."""

import asyncio
import contextlib
import time

import pytest

from mega_agentrl.tool.deadline import DeadlineExceededError, run_with_deadline


async def after(seconds, result):
    await asyncio.sleep(seconds)
    return result


async def stubborn(seconds, result):
    """Does not answer a cancellation."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return result


async def fails(error):
    raise error


async def test_results_and_errors_pass():
    assert await run_with_deadline(after(0, 5), 1) == 5
    assert await run_with_deadline(after(0, 5), None) == 5
    with pytest.raises(KeyError):
        await run_with_deadline(fails(KeyError("x")), 1)
    with pytest.raises(TimeoutError):
        await run_with_deadline(fails(TimeoutError()), 1)


async def test_work_that_cancels_itself_is_no_cancellation():
    with pytest.raises(RuntimeError, match="cancelled itself"):
        await run_with_deadline(fails(asyncio.CancelledError()), 1)


async def test_the_deadline_is_hard_and_what_comes_late_is_undone():
    undone, ended = [], []

    async def undo(result):
        undone.append(result)

    release, over = asyncio.Event(), asyncio.Event()

    def end():
        ended.append(1)
        over.set()

    async def deaf():
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return "late"

    with pytest.raises(DeadlineExceededError, match=r"not done within 0\.05 s"):
        await run_with_deadline(deaf(), 0.05, undo=undo, on_end=end)
    assert (undone, ended) == ([], [])
    release.set()
    await asyncio.wait_for(over.wait(), 60)
    assert (undone, ended) == (["late"], [1])


async def test_cancellation_ends_the_work_and_undoes_what_is_done():
    undone = []

    async def undo(result):
        undone.append(result)

    for work in (after(30, "never"), stubborn(0.1, "late")):
        task = asyncio.create_task(run_with_deadline(work, None, undo=undo))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
    assert undone == ["late"]


async def test_a_result_that_meets_the_cancellation_is_undone():
    undone, gate = [], asyncio.Event()

    async def make():
        await gate.wait()
        return "made"

    async def undo(result):
        undone.append(result)

    task = asyncio.create_task(run_with_deadline(make(), None, undo=undo))
    await asyncio.sleep(0.01)
    gate.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["made"]

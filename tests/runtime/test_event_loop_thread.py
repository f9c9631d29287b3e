"""A loop that goes on in a thread of its own, waited for in the main thread."""

import asyncio
import os
import signal
import threading
import time

import pytest

from mega_agentrl.runtime.event_loop_thread import EventLoopThread
from mega_agentrl.train.signals import EXIT_CODES, RunInterrupted, SignalHandler

DEADLINE_S = 300


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_tasks_started_by_a_coroutine_keep_running():
    begun, seen = threading.Event(), threading.Event()

    async def notice():
        while not begun.is_set():
            await asyncio.sleep(0.001)
        seen.set()

    async def start():
        return asyncio.create_task(notice())

    with EventLoopThread() as thread:
        task = thread.run(start())
        begun.set()
        assert seen.wait(DEADLINE_S), "the loop stops when nothing waits for it"
        assert not task.cancelled()


def test_results_errors_and_cancellations_are_returned():
    async def give(value):
        await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value

    with EventLoopThread() as thread:
        assert thread.run(give(3)) == 3
        for error in (KeyError("a bug"), asyncio.CancelledError()):
            with pytest.raises(type(error)):
                thread.run(give(error))
        assert thread.run(give(4)) == 4


def test_close_cancels_remaining_tasks_and_waits():
    cleaned_up = []

    async def rest():
        try:
            await asyncio.sleep(DEADLINE_S)
        finally:
            await asyncio.sleep(0.01)
            cleaned_up.append(True)

    async def start():
        task = asyncio.create_task(rest())
        await asyncio.sleep(0)
        return task

    with EventLoopThread() as thread:
        task = thread.run(start())
    assert cleaned_up == [True] and task.cancelled()
    thread.close()
    assert "rollouts" not in {one.name for one in threading.enumerate()}


@pytest.mark.parametrize("is_shielded", [False, True])
def test_signal_in_the_main_thread_cancels_the_coroutine(handlers, is_shielded):
    signal_handler, cleaned_up = SignalHandler(), []
    signal_handler.install()

    async def work():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            until_s = time.monotonic() + DEADLINE_S
            while signal_handler.received_signal is None and time.monotonic() < until_s:
                await asyncio.sleep(0.01)
            if not is_shielded:
                await asyncio.sleep(DEADLINE_S)
            return "done"
        finally:
            cleaned_up.append(True)

    start_s = time.monotonic()
    with EventLoopThread() as thread:
        wait = signal_handler.make_cancellable(thread.run)
        with pytest.raises(RunInterrupted) as caught:
            if is_shielded:
                with signal_handler.defer_signals():
                    assert wait(work()) == "done"
            else:
                wait(work())
    assert caught.value.number == signal.SIGUSR1
    assert cleaned_up == [True]
    assert time.monotonic() - start_s < DEADLINE_S

"""A loop that goes on in a thread of its own, waited for in the main thread."""

import asyncio
import os
import signal
import threading
import time

import pytest

from mega_agentrl.runtime.loop_thread import LoopThread
from mega_agentrl.train.stopping import CODES, Stopped, Stopper

DEADLINE_S = 20


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_a_coroutine_started_goes_on_behind_its_end():
    begun, seen = threading.Event(), threading.Event()

    async def notice():
        while not begun.is_set():
            await asyncio.sleep(0.001)
        seen.set()

    async def start():
        return asyncio.create_task(notice())

    with LoopThread() as thread:
        task = thread.run(start())
        begun.set()
        assert seen.wait(DEADLINE_S), "the loop stands still while nobody waits for it"
        assert not task.cancelled()


def test_results_errors_and_cancellations_come_back():
    async def give(value):
        await asyncio.sleep(0)
        if isinstance(value, BaseException):
            raise value
        return value

    with LoopThread() as thread:
        assert thread.run(give(3)) == 3
        for error in (KeyError("a bug"), asyncio.CancelledError()):
            with pytest.raises(type(error)):
                thread.run(give(error))
        assert thread.run(give(4)) == 4


def test_its_end_cancels_what_is_left_and_waits_for_it():
    tidied = []

    async def rest():
        try:
            await asyncio.sleep(DEADLINE_S)
        finally:
            await asyncio.sleep(0.01)
            tidied.append(True)

    async def start():
        task = asyncio.create_task(rest())
        await asyncio.sleep(0)
        return task

    with LoopThread() as thread:
        kept = thread.run(start())
    assert tidied == [True] and kept.cancelled()
    thread.close()
    assert "rollouts" not in {one.name for one in threading.enumerate()}


@pytest.mark.parametrize("is_shielded", [False, True])
def test_a_signal_reaches_the_main_thread_and_cancels_what_it_waits_for(handlers, is_shielded):
    stopper, tidied = Stopper(), []
    stopper.listen()

    async def work():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            until_s = time.monotonic() + DEADLINE_S
            while stopper.asked is None and time.monotonic() < until_s:
                await asyncio.sleep(0.01)
            if not is_shielded:
                await asyncio.sleep(DEADLINE_S)
            return "done"
        finally:
            tidied.append(True)

    start_s = time.monotonic()
    with LoopThread() as thread:
        wait = stopper.waiting(thread.run)
        with pytest.raises(Stopped, match="SIGUSR1"):
            if is_shielded:
                with stopper.shielded():
                    assert wait(work()) == "done"
            else:
                wait(work())
    assert tidied == [True]
    assert time.monotonic() - start_s < DEADLINE_S


def test_an_error_in_the_main_thread_cancels_it_too(handlers):
    tidied = []

    def fail(number, frame):
        raise KeyError("a bug")

    async def work():
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            await asyncio.sleep(DEADLINE_S)
        finally:
            tidied.append(True)

    signal.signal(signal.SIGUSR1, fail)
    with LoopThread() as thread, pytest.raises(KeyError, match="a bug"):
        thread.run(work())
    assert tidied == [True]

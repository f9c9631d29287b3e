"""Signals: raised at once, after a shield, through a cancelled coroutine, or by a deadline."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mega_agentrl.train import stopping
from mega_agentrl.train.stopping import CODES, DEADLINES_S, Stopped, Stopper


def test_a_signal_raises_at_once_and_is_named():
    stopper = Stopper()
    assert stopper.exit_code == 130
    with pytest.raises(Stopped, match="SIGUSR1"):
        stopper.on_signal(signal.SIGUSR1)
    assert stopper.exit_code == 75
    with pytest.raises(Stopped, match="SIGUSR1"):
        stopper.check()
    stopper.heed()
    stopper.check()


def test_in_a_shield_it_waits_for_the_end_of_the_outermost():
    stopper, done = Stopper(), []
    with pytest.raises(Stopped, match="SIGTERM"), stopper.shielded():
        with stopper.shielded():
            stopper.on_signal(signal.SIGTERM)
            done.append("inner")
        stopper.check()
        done.append("outer")
    assert done == ["inner", "outer"]
    assert stopper.exit_code == 143


def test_an_error_in_a_shield_is_not_hidden_by_a_signal():
    stopper = Stopper()
    with pytest.raises(KeyError, match="a bug"), stopper.shielded():
        stopper.on_signal(signal.SIGTERM)
        raise KeyError("a bug")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_ends_even_in_a_shield_but_usr1_only_repeats_itself(number):
    stopper = Stopper()
    with pytest.raises(KeyboardInterrupt) as caught, stopper.shielded():
        stopper.on_signal(signal.SIGUSR1)
        stopper.on_signal(signal.SIGUSR1)
        stopper.on_signal(number)
    assert not isinstance(caught.value, Stopped)
    assert stopper.exit_code == 75


def test_a_coroutine_is_cancelled_and_tidies_up_before_the_run_hears_of_it():
    stopper, tidied = Stopper(), []

    async def work():
        try:
            asyncio.get_running_loop().call_later(0.01, stopper.on_signal, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    async def others():
        return len(asyncio.all_tasks())

    with asyncio.Runner() as runner:
        wait = stopper.waiting(runner.run)
        with pytest.raises(Stopped, match="SIGINT"):
            wait(work())
        assert tidied == [True]
        stopper.heed()
        assert wait(others()) == 1, "the loop can still be used, and nothing else is in it"


def test_a_coroutine_that_ends_despite_it_is_followed_by_the_stop():
    stopper = Stopper()

    async def work():
        stopper.on_signal(signal.SIGINT)
        return 1

    with asyncio.Runner() as runner, pytest.raises(Stopped):
        stopper.waiting(runner.run)(work())


def test_a_cancellation_of_another_kind_stays_one():
    async def work():
        raise asyncio.CancelledError

    with asyncio.Runner() as runner, pytest.raises(asyncio.CancelledError):
        Stopper().waiting(runner.run)(work())


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in CODES}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_guarded_run_that_is_too_slow_ends_without_its_save(handlers, monkeypatch):
    monkeypatch.setitem(DEADLINES_S, signal.SIGUSR1, 0.05)
    stopper = Stopper()
    stopper.listen()
    stopper.begin_guard()
    with pytest.raises(KeyboardInterrupt) as caught, stopper.shielded():
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(30)
    assert not isinstance(caught.value, Stopped)
    assert stopper.exit_code == 75
    stopper.end_guard()


def test_after_the_guard_there_is_no_deadline(handlers, monkeypatch):
    clocks = []

    class Clock(threading.Timer):
        def start(self):
            clocks.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Clock)
    stopper = Stopper()
    stopper.listen()
    stopper.begin_guard()
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)
    (clock,) = clocks
    assert clock.interval == DEADLINES_S[signal.SIGTERM]
    stopper.end_guard()
    assert clock.finished.is_set()


def test_a_real_signal_wakes_a_loop_that_waits(handlers):
    stopper = Stopper()
    stopper.listen()

    async def work():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        await asyncio.sleep(600)

    with asyncio.Runner() as runner, pytest.raises(Stopped, match="SIGUSR1"):
        stopper.waiting(runner.run)(work())


def test_the_save_at_usr1_ends_before_slurm_does():
    assert DEADLINES_S[signal.SIGUSR1] < 120
    assert DEADLINES_S.keys() == CODES.keys()


def test_listening_imports_nothing_heavy():
    code = (
        "import sys; from mega_agentrl.train import stopping; stopping.PROCESS.listen();"
        "print([name for name in ('torch', 'ray', 'hydra', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
    assert isinstance(stopping.PROCESS, Stopper)

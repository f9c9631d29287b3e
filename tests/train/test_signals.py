"""Signals: raised at once, after a deferral, through a cancelled coroutine, or by a deadline."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mega_agentrl.train.signals import EXIT_CODES, SAVE_TIMEOUTS_S, RunInterrupted, SignalHandler


def test_a_signal_raises_at_once_and_is_named():
    signal_handler = SignalHandler()
    assert signal_handler.exit_code == 130
    with pytest.raises(RunInterrupted) as caught:
        signal_handler.on_signal(signal.SIGUSR1)
    assert caught.value.number == signal.SIGUSR1
    assert str(caught.value) == "SIGUSR1"
    assert signal_handler.exit_code == 75
    with pytest.raises(RunInterrupted):
        signal_handler.raise_if_signalled()
    signal_handler.mark_handled()
    signal_handler.raise_if_signalled()


def test_a_deferred_signal_waits_for_the_end_of_the_outermost_deferral():
    signal_handler, done = SignalHandler(), []
    with pytest.raises(RunInterrupted), signal_handler.defer_signals():
        with signal_handler.defer_signals():
            signal_handler.on_signal(signal.SIGTERM)
            done.append("inner")
        signal_handler.raise_if_signalled()
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal_handler.exit_code == 143


def test_an_error_during_a_deferral_is_not_hidden_by_a_signal():
    signal_handler = SignalHandler()
    with pytest.raises(ZeroDivisionError), signal_handler.defer_signals():
        signal_handler.on_signal(signal.SIGTERM)
        raise ZeroDivisionError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_even_a_deferral_except_for_a_repeated_usr1(number):
    signal_handler = SignalHandler()
    with pytest.raises(KeyboardInterrupt) as caught, signal_handler.defer_signals():
        signal_handler.on_signal(signal.SIGUSR1)
        signal_handler.on_signal(signal.SIGUSR1)
        signal_handler.on_signal(number)
    assert not isinstance(caught.value, RunInterrupted)
    assert signal_handler.exit_code == 75


def test_a_coroutine_is_cancelled_and_tidies_up_before_the_run_hears_of_it():
    signal_handler, tidied = SignalHandler(), []

    async def work():
        try:
            asyncio.get_running_loop().call_later(0.01, signal_handler.on_signal, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    async def others():
        return len(asyncio.all_tasks())

    with asyncio.Runner() as runner:
        wait = signal_handler.make_cancellable(runner.run)
        with pytest.raises(RunInterrupted):
            wait(work())
        assert tidied == [True]
        signal_handler.mark_handled()
        assert wait(others()) == 1, "the loop can still be used, and nothing else is in it"


def test_a_coroutine_that_ignores_the_signal_is_followed_by_the_interrupt():
    signal_handler = SignalHandler()

    async def work():
        signal_handler.on_signal(signal.SIGINT)
        return 1

    with asyncio.Runner() as runner, pytest.raises(RunInterrupted):
        signal_handler.make_cancellable(runner.run)(work())


def test_a_cancellation_of_another_kind_stays_one():
    async def work():
        raise asyncio.CancelledError

    with asyncio.Runner() as runner, pytest.raises(asyncio.CancelledError):
        SignalHandler().make_cancellable(runner.run)(work())


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    unraisable_hook = sys.unraisablehook
    yield
    sys.unraisablehook = unraisable_hook
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_in_a_finalizer_is_delivered_again(handlers, capsys):
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGUSR1)

    signal_handler = SignalHandler()
    signal_handler.install()
    with pytest.raises(RunInterrupted):
        Finalized()
        time.sleep(30)
    assert signal_handler.exit_code == 75
    assert "Traceback" not in capsys.readouterr().err


def test_a_save_that_is_too_slow_is_given_up(handlers, monkeypatch):
    monkeypatch.setitem(SAVE_TIMEOUTS_S, signal.SIGUSR1, 0.05)
    signal_handler = SignalHandler()
    signal_handler.install()
    signal_handler.enable_save_timeout()
    with pytest.raises(KeyboardInterrupt) as caught, signal_handler.defer_signals():
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(30)
    assert not isinstance(caught.value, RunInterrupted)
    assert signal_handler.exit_code == 75
    signal_handler.disable_save_timeout()


def test_without_save_timeout_there_is_no_deadline(handlers, monkeypatch):
    clocks = []

    class Clock(threading.Timer):
        def start(self):
            clocks.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Clock)
    signal_handler = SignalHandler()
    signal_handler.install()
    signal_handler.enable_save_timeout()
    with pytest.raises(RunInterrupted):
        signal.raise_signal(signal.SIGTERM)
    (clock,) = clocks
    assert clock.interval == SAVE_TIMEOUTS_S[signal.SIGTERM]
    signal_handler.disable_save_timeout()
    assert clock.finished.is_set()


def test_a_real_signal_wakes_a_loop_that_waits(handlers):
    signal_handler = SignalHandler()
    signal_handler.install()

    async def work():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        await asyncio.sleep(600)

    with asyncio.Runner() as runner, pytest.raises(RunInterrupted):
        signal_handler.make_cancellable(runner.run)(work())


def test_the_save_at_usr1_ends_before_slurm_does():
    assert SAVE_TIMEOUTS_S[signal.SIGUSR1] < 120
    assert SAVE_TIMEOUTS_S.keys() == EXIT_CODES.keys()


def test_listening_imports_nothing_heavy():
    code = (
        "import sys; from mega_agentrl.train import signals;"
        "signals.PROCESS_SIGNAL_HANDLER.install();"
        "print([name for name in ('torch', 'ray', 'hydra', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("place", "passed"),
    [("before", ["before"]), ("inside", ["before", "inside"]), ("behind", ["before", "behind"])],
)
def test_inside_a_deferral_a_body_may_allow_signals(place, passed):
    """Signalled before, inside or behind the part that allows signals."""
    handler, reached = SignalHandler(), []
    with pytest.raises(RunInterrupted), handler.defer_signals():
        if place == "before":
            handler.on_signal(signal.SIGTERM)
        reached.append("before")
        with handler.allow_signals():
            if place == "inside":
                reached.append("inside")
                handler.on_signal(signal.SIGTERM)
                reached.append("never")
        handler.on_signal(signal.SIGTERM)
        reached.append("behind")
    assert reached == passed


START = """
import atexit, ctypes, sys, time
from mega_agentrl.train.signals import SignalHandler
handler = SignalHandler()
handler.install()
c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
c.pthread_mutex_lock(mutex)
with handler.limit_start(timeout_s=0.5):
    try:
        print("ready", flush=True)
        {wait}
    except BaseException:
        {then}
"""
WAITS = {
    # Handlers of Python run only after the call of C, which never returns: the mutex is locked.
    "in_c": ("c.pthread_mutex_lock(mutex)", "c.pthread_mutex_lock(mutex)"),
    "after_the_exception": ("time.sleep(600)", "time.sleep(600)"),
    "at_exit": ("time.sleep(600)", "atexit.register(time.sleep, 600); raise"),
}


def terminate_while_it_starts(text):
    """Send TERM to a Python program that says when it is ready; return its standard error."""
    child = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == EXIT_CODES[signal.SIGTERM]
    assert "SIGTERM" in stderr
    return stderr


@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_while_a_run_starts_ends_it_even_if_a_library_waits(wait):
    terminate_while_it_starts(START.format(wait=WAITS[wait][0], then=WAITS[wait][1]))


def test_a_second_signal_while_a_run_starts_is_taken_too():
    """Its number is written to the descriptor that the first one has woken."""
    text = START.format(wait="time.sleep(600)", then="time.sleep(600)").replace("0.5", "600")
    child = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "ready\n"
        for _ in range(20):  # until the watcher has read the first one
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=300)
    finally:
        child.kill()
    assert "BrokenPipe" not in stderr


SIGNAL_WHILE_IT_ENDS = """
import os, signal, sys, threading, time
from mega_agentrl.train.signals import SignalHandler
handler = SignalHandler()
handler.install()
passes = 0

class Stderr:
    def write(self, text):
        os.kill(os.getpid(), signal.SIGUSR1)
        start = passes
        while passes < start + 5:  # the main thread has handled the signal
            time.sleep(0.001)
        os.write(2, text.encode())

    def flush(self):
        pass

with handler.limit_start(timeout_s=0.05):
    try:
        print("ready", flush=True)
        time.sleep(600)
    except BaseException:
        sys.stderr = Stderr()
        while True:
            time.sleep(0.001)
            passes += 1
"""


def test_a_signal_in_the_last_moment_of_a_start_prints_no_traceback():
    stderr = terminate_while_it_starts(SIGNAL_WHILE_IT_ENDS)
    assert "BrokenPipe" not in stderr and "Traceback" not in stderr


SECOND_SIGNAL = """
import atexit, sys, time, types
import mega_agentrl
from mega_agentrl import __main__ as entry

def close():
    print("closing", flush=True)
    time.sleep(600)

def main():
    try:
        print("ready", flush=True)
        time.sleep(600)
    finally:
        {first}

mega_agentrl.cli = sys.modules["mega_agentrl.cli"] = types.SimpleNamespace(main=main)
entry.main()
"""
CLOSES = {"while_the_run_closes": "close()", "at_exit": "atexit.register(close)"}


@pytest.mark.parametrize("place", CLOSES)
def test_a_second_signal_ends_the_process_in_one_line(place):
    child = subprocess.Popen(
        [sys.executable, "-c", SECOND_SIGNAL.format(first=CLOSES[place])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in ("ready", "closing"):
            assert child.stdout.readline() == f"{line}\n"
            child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == EXIT_CODES[signal.SIGTERM]
    assert stderr.startswith("mega_agentrl: interrupted") and stderr.count("\n") == 1


def test_after_the_start_a_signal_has_no_limit():
    signal_handler = SignalHandler()
    before = set(threading.enumerate())
    with signal_handler.limit_start(timeout_s=0.0):
        pass
    assert set(threading.enumerate()) <= before
    with pytest.raises(RunInterrupted):
        signal_handler.on_signal(signal.SIGTERM)

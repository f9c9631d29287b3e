"""Signals that end a run, delivered at points where nothing is lost.

    USR1          save and exit with code 75: the queue starts the same command again
    INT, TERM     save and exit with 130 or 143; a second one exits immediately

A signal raises `RunInterrupted` in the main thread; the coroutine that the run waits for is
cancelled first, so that engines and tools are released. `defer_signals` delays it to the end of the
body, in which the state is between two steps; `allow_signals` permits it again in those parts of
the body that change nothing. Between `enable_save_timeout` and `disable_save_timeout` the run saves
at a signal, for which it has `SAVE_TIMEOUTS_S`; after that it exits as at a second signal.

This module imports nothing heavy, because `python -m mega_agentrl` installs the handlers before
anything else. `checkpoints` decides what is saved.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from types import FrameType

ResultT = TypeVar("ResultT")

EXIT_CODES: dict[int, int] = {signal.SIGUSR1: 75, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes by signal; `slurm/train.sh` puts a run with code 75 back into the queue."""

SAVE_TIMEOUTS_S: dict[int, float] = {
    signal.SIGUSR1: 100.0,
    signal.SIGINT: 25.0,
    signal.SIGTERM: 25.0,
}
"""Seconds for a save, by signal.

Slurm sends USR1 120 s before the time limit (`slurm/train.sh`), and usually KILL 30 s after TERM.
"""


REPEAT_DELAY_S = 0.05
"""Seconds after which a signal is delivered again whose exception was lost."""
START_TIMEOUT_S = 10.0
"""Seconds from a signal to the end of the process if it is received while the run starts."""


class RunInterrupted(KeyboardInterrupt):
    """A signal asked the run to end.

    A `KeyboardInterrupt`, because event loops and Ray pass on nothing else.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalHandler:
    """Handles the signals that ask a process to end.

    Everything runs in the main thread, except for the timer of a save and for coroutines whose
    event loop has a thread of its own.
    """

    def __init__(self) -> None:
        self.received_signal: int | None = None
        """The first signal received."""
        self._num_deferrals = 0
        self._has_save_timeout = False
        self._is_handled = False
        self._ends_process = False
        self._task: asyncio.Task[Any] | None = None
        self._save_timer: threading.Timer | None = None
        self._earlier_hook = sys.unraisablehook

    def install(self) -> None:
        """Install the handlers; may be called again. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                signal.signal(number, self.on_signal)
            if sys.unraisablehook != self._on_unraisable:
                self._earlier_hook = sys.unraisablehook
                sys.unraisablehook = self._on_unraisable

    @property
    def exit_code(self) -> int:
        """Exit code of a process that was asked to end; 130 without a signal."""
        return EXIT_CODES[signal.SIGINT if self.received_signal is None else self.received_signal]

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            RunInterrupted: It is the first signal, no deferral is active and no coroutine is
            running.
            KeyboardInterrupt: It is the second INT or TERM.
        """
        del frame
        if self._ends_process:
            os._exit(EXIT_CODES[self.received_signal or number])
        if self.received_signal is not None:
            # Slurm may repeat USR1 during the save.
            if number != signal.SIGUSR1:
                raise KeyboardInterrupt
            return
        self.received_signal = number
        if self._has_save_timeout:
            self._start_save_timer()
        if self._num_deferrals:
            return
        if (task := self._task) is not None:
            # The loop may run in another thread, or be waiting for input.
            task.get_loop().call_soon_threadsafe(task.cancel)
            return
        raise RunInterrupted(number)

    def end_process_at_next_signal(self) -> None:
        """Let a further signal end the process at once, without an exception.

        For the end of an interrupted process, whose message is printed: an exception in a finalizer
        or at exit would print a traceback and end nothing.
        """
        self._ends_process = True

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Deliver a signal again that Python handled in a finalizer, where exceptions are lost.

        An import runs many of them, so that this is not rare while a run starts.
        """
        number, main = self.received_signal, threading.main_thread().ident
        if number is None or not isinstance(unraisable.exc_value, RunInterrupted):
            self._earlier_hook(unraisable)
            return
        assert main is not None
        if self._save_timer is not None:
            self._save_timer.cancel()
        self.received_signal = None
        timer = threading.Timer(REPEAT_DELAY_S, signal.pthread_kill, (main, number))
        timer.daemon = True
        timer.start()

    def raise_if_signalled(self) -> None:
        """Raise `RunInterrupted` if a signal is pending."""
        if self.received_signal is not None and not self._num_deferrals and not self._is_handled:
            raise RunInterrupted(self.received_signal)

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Defer signals to the end of the body, which then raises `RunInterrupted`."""
        self._num_deferrals += 1
        try:
            yield
        finally:
            self._num_deferrals -= 1
        self.raise_if_signalled()

    @contextmanager
    def allow_signals(self) -> Iterator[None]:
        """Let signals interrupt the body, inside `defer_signals`; a pending one is raised first."""
        num_deferrals = self._num_deferrals
        try:
            self._num_deferrals = 0
            self.raise_if_signalled()
            yield
        finally:
            self._num_deferrals = num_deferrals

    def make_cancellable(
        self, wait: Callable[[Coroutine[Any, Any, ResultT]], ResultT]
    ) -> Callable[[Coroutine[Any, Any, ResultT]], ResultT]:
        """Wrap a function that runs a coroutine, so that a signal cancels the coroutine."""

        async def track_task(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
            self._task = asyncio.current_task()
            try:
                return await coroutine
            finally:
                self._task = None

        def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
            try:
                result = wait(track_task(coroutine))
            except asyncio.CancelledError:
                self.raise_if_signalled()
                raise
            self.raise_if_signalled()
            return result

        return run

    @contextmanager
    def limit_start(self, timeout_s: float = START_TIMEOUT_S) -> Iterator[None]:
        """End the process `timeout_s` seconds after a signal, unless it has ended by then.

        For the start of a run, where there is nothing to save. A library that waits in C for its
        servers, which the same signal may have ended, lets no handler run, and may wait for a
        minute; one that swallows the exception of the handler goes on. The limit stays in force
        after the body if a signal was received in it, because libraries also wait at exit. Does
        nothing outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        has_ended = threading.Event()
        watcher = threading.Thread(
            target=_end_after_signal, args=(receiver, has_ended, timeout_s), daemon=True
        )
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            if self.received_signal is None:
                has_ended.set()
                sender.close()
                watcher.join()

    def enable_save_timeout(self) -> None:
        """Limit the time of the save that a signal starts."""
        self._has_save_timeout = True
        if self.received_signal is not None:
            self._start_save_timer()

    def mark_handled(self) -> None:
        """Record that `RunInterrupted` was caught; it is not raised again during the save."""
        self._is_handled = True

    def disable_save_timeout(self) -> None:
        """End the time limit: the save is over, or there is none."""
        self._has_save_timeout = False
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None

    def _start_save_timer(self) -> None:
        assert self.received_signal is not None
        main = threading.main_thread().ident
        assert main is not None
        # A real signal also interrupts a system call in which the run hangs.
        self._save_timer = threading.Timer(
            SAVE_TIMEOUTS_S[self.received_signal], signal.pthread_kill, (main, signal.SIGTERM)
        )
        self._save_timer.daemon = True
        self._save_timer.start()


def _end_after_signal(
    receiver: socket.socket, has_ended: threading.Event, timeout_s: float
) -> None:
    """Wait for the number of a signal; end the process unless `has_ended` is set in time.

    The receiver stays open to the end of the process, because Python writes each further signal to
    its peer, and prints a traceback if that fails.
    """
    with receiver:
        number = 0
        while number not in EXIT_CODES:
            if not (received := receiver.recv(1)):
                return
            number = received[0]
        if has_ended.wait(timeout_s):
            return
        print(
            f"mega_agentrl: interrupted ({signal.Signals(number).name}) while the run was "
            f"starting, and ended {timeout_s:g} s later, because a library was still waiting",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_CODES[number])


PROCESS_SIGNAL_HANDLER = SignalHandler()
"""The handler of `python -m mega_agentrl`; signal handlers belong to the process, not a run."""

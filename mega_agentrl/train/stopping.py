"""Signals that end a run, delivered where nothing is lost by it.

    USR1          save and end, with code 75: a queue starts the same command again
    INT, TERM     save and end, with 130 or 143; a second one ends at once

A signal raises `Stopped` in the main thread; a coroutine the run waits for is cancelled first, so
that engines and tools are left in order. Inside `shielded` it waits for the end of the body: the
state there is neither that of the step before nor that of the one after. While a run is guarded
(`begin_guard` to `end_guard`, between which it saves), it has `DEADLINES_S` for all of it; past
that it ends as at a second signal.

Nothing heavy is imported here: `python -m mega_agentrl` listens before it does anything else.
What is saved is in `safekeeping`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from types import FrameType

ResultT = TypeVar("ResultT")

CODES: dict[int, int] = {signal.SIGUSR1: 75, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes by signal; 75 is what `slurm/train.sh` puts back into the queue."""

DEADLINES_S: dict[int, float] = {signal.SIGUSR1: 100.0, signal.SIGINT: 25.0, signal.SIGTERM: 25.0}
"""Seconds until a guarded run ends with or without its save. Slurm sends USR1 120 s before the
time limit (`slurm/train.sh`); who sends TERM mostly sends KILL 30 s later."""


class Stopped(KeyboardInterrupt):
    """A signal asks the run to end.

    A `KeyboardInterrupt`, as event loops and Ray let nothing else through.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


class Stopper:
    """What a process was asked to do by signals. asked: the first one's number, None so far.

    Everything runs in the main thread, but for the clock of the deadline and, where they have a
    thread of their own, the coroutines.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._num_shields = 0
        self._is_guarded = False
        self._is_heeded = False
        self._task: asyncio.Task[Any] | None = None
        self._clock: threading.Timer | None = None

    def listen(self) -> None:
        """Take the signals over; safe to call again. Other threads than the main one cannot."""
        if threading.current_thread() is threading.main_thread():
            for number in CODES:
                signal.signal(number, self.on_signal)

    @property
    def exit_code(self) -> int:
        """Of a process that ends because it was asked to; 130 where nobody has."""
        return CODES[signal.SIGINT if self.asked is None else self.asked]

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Heed a signal; raises `Stopped`, or `KeyboardInterrupt` at the second INT or TERM."""
        del frame
        if self.asked is not None:
            # A queue may repeat USR1 while the save is under way.
            if number != signal.SIGUSR1:
                raise KeyboardInterrupt
            return
        self.asked = number
        if self._is_guarded:
            self._start_clock()
        if self._num_shields:
            return
        if (task := self._task) is not None:
            # The loop may be another thread's, or be waiting for input.
            task.get_loop().call_soon_threadsafe(task.cancel)
            return
        raise Stopped(number)

    def check(self) -> None:
        """Raise `Stopped` where a signal waits for it."""
        if self.asked is not None and not self._num_shields and not self._is_heeded:
            raise Stopped(self.asked)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Signals wait for the end of the body, which raises `Stopped` then."""
        self._num_shields += 1
        try:
            yield
        finally:
            self._num_shields -= 1
        self.check()

    def waiting(
        self, wait: Callable[[Coroutine[Any, Any, ResultT]], ResultT]
    ) -> Callable[[Coroutine[Any, Any, ResultT]], ResultT]:
        """The same way to wait for a coroutine, which a signal cancels."""

        async def noted(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
            self._task = asyncio.current_task()
            try:
                return await coroutine
            finally:
                self._task = None

        def wait_or_stop(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
            try:
                result = wait(noted(coroutine))
            except asyncio.CancelledError:
                self.check()
                raise
            self.check()
            return result

        return wait_or_stop

    def begin_guard(self) -> None:
        """From here on somebody saves at a signal."""
        self._is_guarded = True
        if self.asked is not None:
            self._start_clock()

    def heed(self) -> None:
        """`Stopped` has reached who saves; it is not raised again."""
        self._is_heeded = True

    def end_guard(self) -> None:
        """The save is over, or there is none; no deadline from here on."""
        self._is_guarded = False
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _start_clock(self) -> None:
        assert self.asked is not None
        main = threading.main_thread().ident
        assert main is not None
        # A real signal: it also ends a call of the operating system that the run hangs in.
        self._clock = threading.Timer(
            DEADLINES_S[self.asked], signal.pthread_kill, (main, signal.SIGTERM)
        )
        self._clock.daemon = True
        self._clock.start()


PROCESS = Stopper()
"""The one that `python -m mega_agentrl` listens with; handlers are the process's, not a run's."""

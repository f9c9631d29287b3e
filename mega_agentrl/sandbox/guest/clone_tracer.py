"""Holds all threads of a process except the one that clones, and stops the child at its birth.

The kernel reads a process's limits inside the clone, so a limit that is raised for one clone is
raised for all threads of the process. With ptrace no other thread runs meanwhile: they are stopped
one by one, the main thread may finish its system call, and the kernel stops it and its child before
either returns to user mode. If the clone fails, the main thread goes on, but the kernel stops the
first process or thread that it creates in the same way (the filter refuses CLONE_UNTRACED).

The tracer needs no capabilities in its own user namespace: it created the namespaces of the traced
processes. A tracer that ends detaches its processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.guest import processes, syscalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GETEVENTMSG = 0x4201
_SEIZE = 0x4206
_INTERRUPT = 0x4207
_DETACH = 17
_BIRTH_OPTIONS = 0x2 | 0x4 | 0x8  # stop at a fork, vfork or clone, and trace the child
_BIRTH_EVENTS = (1, 2, 3)
_EVENT_SHIFT = 8
_WAIT_ALL = 0x40000000  # __WALL: threads too
_RELEASE_TIMEOUT_S = 10.0  # a thread stops as soon as it is given a CPU
_POLL_INTERVAL_S = 0.0001


class CloneTracer:
    """The traced threads of one process; created by `traced_clone`."""

    def __init__(self, pid: int, deadline: float, *, is_child: bool) -> None:
        self._pid = pid
        self._deadline = deadline
        self._is_child = is_child
        self._signals: dict[int, int | None] = {}
        """For each traced thread the signal to deliver when it is released, None if it runs."""

    def hold_other_threads(self) -> None:
        """Trace the main thread, and stop all others; raises `OSError`."""
        self._seize(self._pid, _BIRTH_OPTIONS)
        while new := self._untraced_threads():
            for thread in new:
                self._seize(thread, 0)
            for thread in new & {*self._signals}:
                self._interrupt(thread, self._deadline)
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"the threads of process {self._pid} did not stop")

    def run_clone(self, answer: Callable[[], None], is_over: Callable[[], bool]) -> int | None:
        """Let the main thread continue, and return the child that it has created, with both held.

        Args:
            answer: Lets the clone in which the main thread hangs continue.
            is_over: Returns whether to stop waiting.

        Returns:
            The process id of the child. None if there is none: the clone failed, a signal
            interrupted it, `is_over` returned True, or the deadline has passed.

        Raises:
            OSError: The main thread cannot be held.
        """
        deadline = self._deadline
        try:
            answer()
        except FileNotFoundError:  # a signal has interrupted the clone
            deadline = 0.0
        stop = None
        while stop is None and time.monotonic() < deadline and not is_over():
            time.sleep(_POLL_INTERVAL_S)
            stop = self._poll_stop(self._pid)
        if stop is None:
            stop = self._interrupt(self._pid, time.monotonic() + _RELEASE_TIMEOUT_S)
        if stop is None or stop >> _EVENT_SHIFT not in _BIRTH_EVENTS:
            return None
        message = ctypes.c_ulong()
        syscalls.ptrace(_GETEVENTMSG, self._pid, ctypes.addressof(message))
        child = int(message.value)
        self._signals[child] = None
        self._wait_until_held(child, time.monotonic() + _RELEASE_TIMEOUT_S)
        return child

    def release(self) -> None:
        """Let all traced threads go on.

        Raises:
            TimeoutError: A thread cannot be stopped, as its release requires; the process was
                killed.
        """
        # The kernel reports a process's end only after that of its other threads.
        threads = sorted(self._signals, key=lambda thread: thread == self._pid)
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        try:
            for thread in threads:
                if self._signals.get(thread) is None:
                    self._interrupt(thread, deadline)
                if thread in self._signals:
                    with contextlib.suppress(ProcessLookupError):
                        syscalls.ptrace(_DETACH, thread, self._signals[thread] or 0)
                        del self._signals[thread]
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            raise
        finally:
            self._collect(deadline + _RELEASE_TIMEOUT_S)

    def _collect(self, deadline: float) -> None:
        """Wait for the end of threads that could not be detached because they were killed."""
        for thread in sorted(self._signals, key=lambda thread: thread == self._pid):
            while thread in self._signals and time.monotonic() < deadline:
                self._poll_stop(thread)
                time.sleep(_POLL_INTERVAL_S)

    def _untraced_threads(self) -> set[int]:
        threads = {int(name) for name in os.listdir(f"/proc/{self._pid}/task")} - {*self._signals}
        return {thread for thread in threads if processes.process_state(thread) not in "ZX"}

    def _seize(self, thread: int, options: int) -> None:
        try:
            syscalls.ptrace(_SEIZE, thread, options)
        except OSError:
            if thread == self._pid or processes.process_state(thread) not in "ZX":
                raise
        else:
            self._signals[thread] = None

    def _interrupt(self, thread: int, deadline: float) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            syscalls.ptrace(_INTERRUPT, thread, 0)
        return self._wait_until_held(thread, deadline)

    def _wait_until_held(self, thread: int, deadline: float) -> int | None:
        """Return how a thread has stopped, None if it has ended; raises `TimeoutError`."""
        while (stop := self._poll_stop(thread)) is None and thread in self._signals:
            if time.monotonic() > deadline:
                raise TimeoutError(f"thread {thread} of process {self._pid} did not stop")
            time.sleep(_POLL_INTERVAL_S)
        return stop

    def _poll_stop(self, thread: int) -> int | None:
        """Return signal and event (times 256) of a new stop; forget a thread that has ended."""
        collects = thread != self._pid or not self._is_child  # else its end is not ours to collect
        options = os.WSTOPPED | os.WNOHANG | _WAIT_ALL | (os.WEXITED if collects else 0)
        has_ended = False
        try:
            info = os.waitid(os.P_PID, thread, options)
        except ChildProcessError:
            info, has_ended = None, True
        if info is None:
            has_ended |= not collects and processes.process_state(thread) in "ZX"
        elif info.si_code not in (os.CLD_TRAPPED, os.CLD_STOPPED):
            info, has_ended = None, True
        if has_ended:
            self._signals.pop(thread, None)
        if info is None:
            return None
        stop = int(info.si_status)
        self._signals[thread] = 0 if stop >> _EVENT_SHIFT else stop
        return stop


@contextlib.contextmanager
def traced_clone(pid: int, deadline: float, *, is_child: bool) -> Iterator[CloneTracer]:
    """Hold all threads of a process except the main one, which hangs in a clone; then release all.

    Args:
        pid: The process.
        deadline: When to give up, in seconds of `time.monotonic`.
        is_child: Whether the process is a child of this one.

    Raises:
        OSError: A thread cannot be traced; `TimeoutError` if one does not stop.
    """
    tracer = CloneTracer(pid, deadline, is_child=is_child)
    try:
        tracer.hold_other_threads()
        yield tracer
    finally:
        tracer.release()

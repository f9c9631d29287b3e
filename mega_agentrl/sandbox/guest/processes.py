"""Inspects processes through /proc, and kills those that an interpreter left running."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PROCESS_GONE_ERRORS = (FileNotFoundError, ProcessLookupError)
_STOPPED_STATES = "TtZX"  # states in which a process cannot fork
_MIN_POLL_INTERVAL_S = 0.0002
_MAX_POLL_INTERVAL_S = 0.02

STOP_TIMEOUT_S = 30.0
"""Time for processes to stop or end.

Milliseconds are enough on an idle machine. On a busy one each process has to be given a CPU before
it stops: 6 s have been seen at a load of nine per CPU.
"""


def child_pids(pid: int) -> list[int]:
    """Return the process ids of a process's children, zombies included."""
    pids: list[int] = []
    with contextlib.suppress(*_PROCESS_GONE_ERRORS):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
            pids += [int(word) for word in text.split()]
    return pids


def stat_fields(pid: int, thread: int | None = None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; raises `OSError` for a gone process.

    Args:
        pid: Process id.
        thread: Id of one of its threads, None for the process.
    """
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    text = Path(path).read_text(encoding="ascii", errors="replace")
    return text.rpartition(") ")[2].split()


def process_state(pid: int, thread: int | None = None) -> str:
    """Return the state letter of a process (or one of its threads), "X" if it is gone."""
    try:
        return stat_fields(pid, thread)[0]
    except _PROCESS_GONE_ERRORS:
        return "X"


def cpu_time_s(pid: int) -> float:
    """Return the CPU time of a process's threads so far, 0 if it is gone."""
    try:
        fields = stat_fields(pid)
    except _PROCESS_GONE_ERRORS:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_stopped(pid: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Wait until every thread of a process that got SIGSTOP is stopped; raises `TimeoutError`."""
    _wait_until(lambda: _is_stopped(pid), timeout_s, f"process {pid} did not stop")


def _wait_until(condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
    """Poll, more and more rarely: what is waited for may need this CPU."""
    deadline = time.monotonic() + timeout_s
    interval_s = _MIN_POLL_INTERVAL_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _MAX_POLL_INTERVAL_S)


def _is_stopped(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except _PROCESS_GONE_ERRORS:
        return True
    return all(process_state(pid, int(thread)) in _STOPPED_STATES for thread in threads)


def _is_alive(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def kill_descendants(pid: int, *, spare: set[int], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Kill every descendant of a stopped process, except those in `spare` and their descendants.

    All are stopped before the first is killed, so that none can fork when the death of another
    makes room below their limit of processes.

    Raises:
        TimeoutError: The processes do not stop or end in time.
    """
    deadline = time.monotonic() + timeout_s
    alive = _stop_descendants(pid, spare, timeout_s)
    for descendant in alive:
        _send_signal(descendant, signal.SIGKILL)
    _wait_until(
        lambda: not any(map(_is_alive, alive)),
        deadline - time.monotonic(),
        f"processes left by {pid} did not end",
    )


def _stop_descendants(pid: int, spare: set[int], timeout_s: float) -> set[int]:
    """Stop the descendants of a stopped process; return those that are alive."""
    deadline = time.monotonic() + timeout_s
    interval_s = _MIN_POLL_INTERVAL_S
    alive: set[int] = set()
    all_stopped = False
    while descendants := _descendants(pid, spare):  # else not even a zombie that has left children
        last_alive, alive = alive, set(filter(_is_alive, descendants))
        # A process may fork just before it stops and after it was listed. A list is complete only
        # if it equals the one before and all processes in that one had already stopped.
        if all_stopped and alive == last_alive:
            return alive
        for descendant in alive - last_alive:  # first of all: those that run go on forking
            _send_signal(descendant, signal.SIGSTOP)
        running = [descendant for descendant in alive if not _is_stopped(descendant)]
        all_stopped = not running
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes left by {pid} did not stop")
        for descendant in running:  # another one may have continued it
            _send_signal(descendant, signal.SIGSTOP)
        if running and alive == last_alive:
            time.sleep(interval_s)  # they may need this CPU in order to stop
            interval_s = min(2 * interval_s, _MAX_POLL_INTERVAL_S)
    return set()


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int, spare: set[int]) -> list[int]:
    children = [child for child in child_pids(pid) if child not in spare]
    return children + [
        descendant for child in children for descendant in _descendants(child, spare)
    ]

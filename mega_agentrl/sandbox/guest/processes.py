"""Inspects processes through /proc, and kills those that an interpreter left running."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_PROCESS_GONE_ERRORS = (FileNotFoundError, ProcessLookupError)
_STOP_TIMEOUT_S = 2.0
_STOPPED_STATES = "TtZX"  # states in which a process cannot fork


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


def wait_until_stopped(pid: int) -> None:
    """Wait until every thread of a process that got SIGSTOP is stopped; raises `TimeoutError`."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while not _is_stopped(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop")
        time.sleep(0.0002)


def _is_stopped(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except _PROCESS_GONE_ERRORS:
        return True
    return all(process_state(pid, int(thread)) in _STOPPED_STATES for thread in threads)


def _is_alive(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def kill_descendants(pid: int, *, spare: set[int]) -> None:
    """Kill every descendant of a stopped process, except those in `spare` and their descendants.

    All are stopped before the first is killed, so that none can fork when the death of another
    makes room below their limit of processes.

    Raises:
        TimeoutError: The processes do not stop or end in time.
    """
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    stopped: set[int] = set()
    last_alive: set[int] | None = None
    while True:
        descendants = _descendants(pid, spare)
        if not descendants:  # not even a zombie, which may have left children
            return
        alive = set(filter(_is_alive, descendants))
        # A process may fork just before it stops and after it was listed. A list is complete only
        # if it equals the one before and all processes in that one had already stopped.
        if alive == last_alive:
            break
        last_alive = alive if alive <= stopped and all(map(_is_stopped, alive)) else None
        for descendant in alive - stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGSTOP)
        stopped |= alive
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes left by {pid} did not stop")
    for descendant in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(descendant, signal.SIGKILL)
    while any(map(_is_alive, alive)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes left by {pid} did not end")
        time.sleep(0.0002)


def _descendants(pid: int, spare: set[int]) -> list[int]:
    children = [child for child in child_pids(pid) if child not in spare]
    return children + [
        descendant for child in children for descendant in _descendants(child, spare)
    ]

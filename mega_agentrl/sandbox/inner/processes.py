"""Looks at processes through /proc and ends what a cell left running. Linux only.

A process that vanishes while we look counts as gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError)
_STOP_DEADLINE_S = 2.0
_STILL = "TtZX"  # states in which a process starts no other


def children(pid: int) -> list[int]:
    """Its children, zombies too."""
    found: list[int] = []
    with contextlib.suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
            found += [int(word) for word in text.split()]
    return found


def state(pid: int, thread: int | None = None) -> str:
    """Its state's letter, "X" for one that is gone."""
    try:
        path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
        return Path(path).read_text(encoding="ascii", errors="replace").rpartition(") ")[2][0]
    except _GONE:
        return "X"


def cpu_s(pid: int) -> float:
    """CPU time of its threads so far, 0 for one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except _GONE:
        return 0.0
    fields = text.rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_still(pid: int) -> None:
    """Wait until every thread of a process sent SIGSTOP has stopped; raises `TimeoutError`."""
    deadline = time.monotonic() + _STOP_DEADLINE_S
    while not _is_still(pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} did not stop")
        time.sleep(0.0002)


def _is_still(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except _GONE:
        return True
    return all(state(pid, int(thread)) in _STILL for thread in threads)


def wait_until_alone(pid: int) -> None:
    """Wait until all its descendants have ended; raises `TimeoutError`."""
    deadline = time.monotonic() + _STOP_DEADLINE_S
    while any(state(one) not in "ZX" for one in _descendants(pid, set())):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes left by {pid} did not end")
        time.sleep(0.0005)


def end_leftovers(pid: int, *, spare: set[int]) -> None:
    """Kill every descendant of a stopped process, but those in `spare` and theirs.

    All are stopped before the first is killed: at their limit of processes, none of them can
    use the place that another leaves. Raises `TimeoutError` where they do not stop.
    """
    deadline = time.monotonic() + _STOP_DEADLINE_S
    stopped: set[int] = set()
    still: set[int] | None = None
    while True:
        alive = {one for one in _descendants(pid, spare) if state(one) not in "ZX"}
        # A process that stops while it is listed may have forked behind the list's back: only a
        # list made while all of them were still, and none of them new, is complete.
        if alive == still:
            break
        still = alive if all(one in stopped and _is_still(one) for one in alive) else None
        for one in alive - stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
        stopped |= alive
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes left by {pid} did not stop")
    for one in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    while any(state(one) not in "ZX" for one in alive):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes left by {pid} did not end")
        time.sleep(0.0002)


def _descendants(pid: int, spare: set[int]) -> list[int]:
    found = [child for child in children(pid) if child not in spare]
    for child in tuple(found):
        found += _descendants(child, spare)
    return found

"""Children of a process and their ends, seen from outside; a process may vanish at any moment."""

import contextlib
import time

import psutil


def descendants(pid):
    """Return the pids of the children of `pid`, their children and so on, zombies included."""
    try:
        return [child.pid for child in psutil.Process(int(pid)).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(pid):
    """Return whether there is a process `pid` that is not a zombie."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_s(pids):
    """Return the seconds of processor time that those of `pids` that are alive have used."""
    total_s = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(int(pid)).cpu_times()
            total_s += times.user + times.system
    return total_s


def wait_until_gone(pids, timeout_s=300.0):
    """Return those of `pids` that are alive after the wait: the kernel ends killed ones late."""
    deadline = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive

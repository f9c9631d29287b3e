"""A host user of its own for each sandbox, where the launcher is root.

The kernel's limit of processes does not bind for the host's user 0, and two sandboxes of one
user could signal each other if a PID namespace ever failed. Users are the numbers 60706 to
61183, which systemd's registry leaves to nobody. Launchers on one host keep apart by a lock
file per number; the kernel drops the lock when its launcher dies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

USERS = range(60706, 61184)

_FOLDERS = ("/run/mega_agentrl", "/tmp/mega_agentrl-users")
_UID_MAP = Path("/proc/self/uid_map")


class HostUser:
    """A user id nobody else has while this object is open."""

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self._lock = lock

    def close(self) -> None:
        """Give it back; safe twice. Its processes must have ended."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def is_needed() -> bool:
    """This process is the host's root, as far as the kernel counts processes."""
    return os.geteuid() == 0 and any(
        inner <= 0 < inner + count and not 0 < outer for inner, outer, count in _mapped()
    )


def take_user() -> HostUser | None:
    """A free user; None where none is needed. Raises `ValueError` where there is none."""
    if not is_needed():
        return None
    folder = _lock_folder()
    usable = [n for n in USERS if any(inner <= n < inner + count for inner, _, count in _mapped())]
    for number in usable:
        lock = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return HostUser(number, lock)
    raise ValueError(
        f"sandbox: no free user id among {USERS.start} to {USERS.stop - 1} ({len(usable)} usable, "
        "all in use); expected one for each sandbox. Probable cause: too many "
        "tool.python.workers on this host, or a container that maps few ids"
    )


def _lock_folder() -> Path:
    for name in _FOLDERS:
        folder = Path(name)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        about = folder.lstat()
        if folder.is_dir() and not folder.is_symlink() and about.st_uid == os.geteuid():
            return folder
    raise ValueError(f"sandbox: none of {_FOLDERS} can be made; expected a folder for lock files")


def _mapped() -> list[tuple[int, int, int]]:
    lines = _UID_MAP.read_text(encoding="ascii").splitlines()
    rows = [tuple(int(word) for word in line.split()) for line in lines]
    return [(inner, outer, count) for inner, outer, count in rows]

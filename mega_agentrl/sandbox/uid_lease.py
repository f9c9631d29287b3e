"""A host user id of its own for each sandbox, if the launcher is root.

The kernel's process limit does not apply to the host's user 0, and two sandboxes of one user could
signal each other if a PID namespace failed. systemd's registry of user ids leaves 60706 to 61183
unused. A launcher locks one file per id; the kernel drops the lock when the launcher dies.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from mega_agentrl.errors import InputError

UID_RANGE = range(60706, 61184)

_LOCK_FOLDERS = ("/run/mega_agentrl", "/tmp/mega_agentrl-users")
_UID_MAP = Path("/proc/self/uid_map")


class UidLease:
    """A user id that no other sandbox has while this object is open."""

    def __init__(self, uid: int, lock_fd: int) -> None:
        self.uid = uid
        self._lock_fd = lock_fd

    def close(self) -> None:
        """Release the id, whose processes must have ended. Safe to call twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def needs_dedicated_uid() -> bool:
    """Return whether this process is the host's root, even from within a user namespace."""
    return os.geteuid() == 0 and any(
        inner <= 0 < inner + count and not 0 < outer for inner, outer, count in _uid_map_rows()
    )


def lease_uid() -> UidLease | None:
    """Lease a free user id; return None if this process needs none.

    Raises:
        ValueError: Every id is in use, or no folder for the lock files can be made.
    """
    if not needs_dedicated_uid():
        return None
    folder = _lock_folder()
    usable_uids = [
        n
        for n in UID_RANGE
        if any(inner <= n < inner + count for inner, _, count in _uid_map_rows())
    ]
    for uid in usable_uids:
        lock_fd = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            continue
        return UidLease(uid, lock_fd)
    raise InputError(
        "free user ids for sandboxes",
        f"0 of {len(usable_uids)} usable among {UID_RANGE.start} to {UID_RANGE.stop - 1}",
        "one for each sandbox",
        "too many tool.python.num_workers, or MCP servers of trajectories (tool.mcp, "
        "per_trajectory), on this host, or a container that maps few ids",
    )


def _lock_folder() -> Path:
    for name in _LOCK_FOLDERS:
        folder = Path(name)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        info = folder.lstat()
        if folder.is_dir() and not folder.is_symlink() and info.st_uid == os.geteuid():
            return folder
    expected = "a folder for lock files that this user can create"
    raise InputError("folders of the sandboxes' lock files", _LOCK_FOLDERS, expected)


def _uid_map_rows() -> list[tuple[int, int, int]]:
    lines = _UID_MAP.read_text(encoding="ascii").splitlines()
    rows = [tuple(int(word) for word in line.split()) for line in lines]
    return [(inner, outer, count) for inner, outer, count in rows]

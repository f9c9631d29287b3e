"""A host user id of its own for each sandbox, if the launcher is root.

The kernel's process limit does not apply to the host's user 0, and two sandboxes of one user could
signal each other if a PID namespace failed. systemd's registry of user ids leaves 60706 to 61183
unused.

A launcher locks a file and an abstract name of a Unix socket per id; the kernel releases both when
the launcher dies. Launchers never hold the same id at once if they share the folder of the files or
the network namespace, which containers of pyxis and Apptainer share with their host. Launchers that
share neither, as in two Docker containers with networks of their own, may hold the same id, which
the random order of the ids makes seldom: the kernel's limits per user then apply to both sandboxes
together. Every user of the host can bind the names, and so make all ids look as if in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
from pathlib import Path

from mega_agentrl.errors import InputError

UID_RANGE = range(60706, 61184)

_LOCK_FOLDERS = ("/run/mega_agentrl", "/tmp/mega_agentrl-users")
_UID_MAP = Path("/proc/self/uid_map")


class UidLease:
    """A user id that no other sandbox has while this object is open."""

    def __init__(self, uid: int, lock_fds: list[int]) -> None:
        self.uid = uid
        self._lock_fds = lock_fds

    def close(self) -> None:
        """Release the id, whose processes must have ended. Safe to call twice."""
        while self._lock_fds:
            os.close(self._lock_fds.pop())


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
    rows = _uid_map_rows()
    usable_uids = [
        n for n in UID_RANGE if any(inner <= n < inner + count for inner, _, count in rows)
    ]
    # The system's random numbers leave those that the run's seed determines as they are.
    for uid in random.SystemRandom().sample(usable_uids, len(usable_uids)):
        if lease := _try_lease(uid, folder):
            return lease
    raise InputError(
        "free user ids for sandboxes",
        f"0 of {len(usable_uids)} usable among {UID_RANGE.start} to {UID_RANGE.stop - 1}",
        "one for each sandbox",
        "too many tool.python.num_workers, or MCP servers of trajectories (tool.mcp, "
        "per_trajectory), on this host, or a container that maps few ids",
    )


def _try_lease(uid: int, folder: Path) -> UidLease | None:
    """Lock the name and the file of an id; return None if another launcher holds one of them."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0mega_agentrl/sandbox-user/{uid}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        lock_fd = os.open(folder / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            return None
        return UidLease(uid, [lock_fd, name.detach()])


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

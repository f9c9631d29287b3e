"""A lock file between the processes of one machine, released when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_INTERVAL_S = 0.02


@contextmanager
def hold_file_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file, which is created if it does not exist.

    Raises:
        TimeoutError: another process held it for `timeout_s`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire_lock(fd, path, timeout_s)
        yield
    finally:
        os.close(fd)


def _acquire_lock(fd: int, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path}: another process has held it for {timeout_s:g} s; expected its "
                    "release; probable cause: that process is stopped, or the disk is very slow"
                ) from None
            time.sleep(_POLL_INTERVAL_S)
        else:
            return

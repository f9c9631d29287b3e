"""A lock file between the processes of one machine; it goes with the process that holds it.

Consumes nothing, produces nothing. Waits for whoever holds the file, at most a deadline;
unblocked by its release, however that process ended.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S = 0.02


@contextmanager
def hold(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file, made where it is missing; `TimeoutError` after `wait_s`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for(descriptor, path, wait_s)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, wait_s: float) -> None:
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise TimeoutError(
                    f"{path}: another process has held it for {wait_s:g} s; expected it to be "
                    "done by now; probable cause: it was stopped, or the disk is very slow"
                ) from None
            time.sleep(_POLL_S)
        else:
            return

"""Lock of a run folder: one process at a time runs in it, or moves it aside.

The lock is on a file in the folder, `run.lock`. The kernel releases it when the process ends,
however that happens; the file stays.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.report.run_start import read_starts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_FILE, LOG_DIR = "run.lock", "logs"

_logger = logging.getLogger(__name__)


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold the lock of an existing folder in the body.

    Where the file system has no locks, a warning is logged and the body runs without one.

    Raises:
        ConfigError: Another process holds it; the error names its host and pid. Or a file of the
            folder is a link, so that the run would write elsewhere.
    """
    _refuse_links(run_dir)
    lock = FileLock(run_dir / LOCK_FILE, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        starts = read_starts(run_dir)
        holder = f"process {starts[-1].pid} on {starts[-1].host}" if starts else "another process"
        raise ConfigError(
            "run_dir",
            f"{run_dir}, in which {holder} runs",
            "a folder in which no other process runs",
            f"the same command was started twice; or that process still ends, and holds {LOCK_FILE}"
            " there until it has",
        ) from None
    except (OSError, RuntimeError) as error:  # the latter without flock, see filelock
        _logger.warning("%s cannot be locked against a second start: %s", run_dir, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _refuse_links(run_dir: Path) -> None:
    """Raise a `ConfigError` if a file that a run writes is a link; folders may be links."""
    for path in (*run_dir.iterdir(), *(run_dir / LOG_DIR).glob("*")):
        if path.is_symlink() and not path.is_dir():
            raise ConfigError(
                "run_dir",
                f"{run_dir}, where {path.relative_to(run_dir)} is a link to {path.readlink()}",
                "a folder with files of its own; only folders in it may be links",
                "the folder is somebody else's, or the file was moved to another disk",
            )

"""Files that are replaced as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush a file's contents or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_path(path: Path, *, fsync: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` when the body ends.

    Readers see either the old or the new file, even if the process is killed. If the body raises,
    the old file stays. The folder of `path` is created. The temporary path is always the same, so
    that the leftover of a killed process is overwritten; two processes must not write at once.

    Args:
        path: The file.
        fsync: Wait for the disk, so that readers see either file even after a machine crash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    # A leftover; a link is not followed.
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        if fsync:
            fsync_path(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if fsync:
        fsync_path(path.parent)


def atomic_write(path: Path, content: str | bytes, *, fsync: bool = False) -> None:
    """Write a file like `atomic_path`; text is written as UTF-8."""
    with atomic_path(path, fsync=fsync) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)

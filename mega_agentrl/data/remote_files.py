"""Copies remote files to a local cache, one copy per version.

URLs are those of fsspec (`s3://`, `gs://`, `hf://`, `https://`, ...), with the credentials that the
backend finds. The name of a copy contains a digest of the URL and of its version: size, entity tag
and time stamps, whichever the store reports. A changed file is fetched anew; old copies stay until
the user removes them. Several processes may fetch the same file: each writes a temporary file and
renames it, so that no process reads a partial copy.

The driver reads each file once per run. If the disk is slow, `XDG_CACHE_HOME=/dev/shm/...` puts the
copies, also of `file://` paths, into shared memory. fsspec's own `filecache` is not used, because
concurrent processes overwrite each other's index of it.

A file whose address comes from the rows of a data set is somebody else's: its size is checked while
it arrives and it must arrive within a deadline (`FetchLimits`), so that it never stays in the cache
beyond them.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import reading

if TYPE_CHECKING:
    import fsspec

_VERSION_FIELDS = (
    *("size", "etag", "ETag", "Content-MD5", "Digest", "md5Hash", "generation", "blob_id", "lfs"),
    *("LastModified", "last_modified", "mtime", "created"),
)
"""Fields of a store's file info that identify a version; others may change on every request."""

_DIGEST_CHARS = 16
"""Length of a digest in a file name: 64 bits in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of a file that somebody else serves."""

    max_bytes: int
    """Largest size of the file."""
    timeout_s: float = 60.0
    """Time for the whole file, headers included; 32 MiB need 4.5 Mbit/s."""


def fetch_to_cache(url: str, folder: Path, *, key: str, limits: FetchLimits | None = None) -> Path:
    """Return the path of the local copy, fetching the file if it is not cached.

    The copy's name ends with the file's name, whose suffix gives the format.

    Args:
        url: fsspec URL.
        folder: folder of the copies.
        key: configuration key that sets the URL, or the row that has it, for errors.
        limits: bounds of the file; None for a file that the user has chosen.

    Raises:
        ValueError: the URL cannot be read, or the file exceeds the limits.
    """
    import fsspec

    transfer = _Transfer(url, key, limits)
    expected = (
        "a URL that this machine may read, with the package for it installed, credentials and a "
        "network connection"
    )
    with reading(key, url, expected, "it cannot be read"):
        fs, path = fsspec.url_to_fs(url)
        info = fs.info(path, **transfer.time_left(fs))
        transfer.check_size(info.get("size") or 0)
        version = [(name, str(info[name])) for name in _VERSION_FIELDS if name in info]
        name = f"{_digest(url)}-{_digest(version)}-{PurePosixPath(path).name}"
        copy = folder / name
        if not copy.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _download(fs, path, copy, transfer)
    return copy


class _Transfer:
    """The progress of a download; raises a `ConfigError` when it exceeds the limits."""

    def __init__(self, url: str, key: str, limits: FetchLimits | None) -> None:
        self._url = url
        self._key = key
        self._limits = limits
        self._start_s = time.monotonic()

    def check_size(self, num_bytes: int) -> None:
        """Raise if a file has too many bytes."""
        if self._limits is not None and num_bytes > self._limits.max_bytes:
            expected = f"a file of at most {self._limits.max_bytes} bytes"
            raise ConfigError(
                self._key, self._url, expected, f"it has {num_bytes}, or more that are yet to come"
            )

    def check(self, num_bytes: int) -> None:
        """Raise if the bytes that have arrived are too many, or took too long."""
        self.check_size(num_bytes)
        if self._limits is not None and self._seconds_left <= 0:
            raise TimeoutError(f"it did not arrive within {self._limits.timeout_s:g} s")

    def time_left(self, fs: fsspec.AbstractFileSystem) -> dict[str, Any]:
        """Return the arguments that limit the time of a call of a file system, if it has them."""
        if self._limits is None or not fs.async_impl:
            return {}
        return {"timeout": max(self._seconds_left, 0.001)}  # fsspec takes 0 for no limit

    @property
    def _seconds_left(self) -> float:
        assert self._limits is not None
        return self._start_s + self._limits.timeout_s - time.monotonic()


def _download(fs: fsspec.AbstractFileSystem, path: str, target: Path, transfer: _Transfer) -> None:
    from fsspec.callbacks import Callback

    progress = Callback(hooks={"limits": lambda _, num_bytes: transfer.check(num_bytes)})
    # Not `atomic_path`: several processes may fetch the same file, so each needs a name of its own.
    fd, partial = tempfile.mkstemp(prefix=".partial-", dir=target.parent)
    os.close(fd)
    try:
        fs.get_file(path, partial, callback=progress, **transfer.time_left(fs))
        transfer.check_size(os.path.getsize(partial))  # not all file systems report progress
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _digest(text: object) -> str:
    return sha256(str(text).encode()).hexdigest()[:_DIGEST_CHARS]

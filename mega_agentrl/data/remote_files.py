"""Copies remote files to a local cache, one copy per version.

URLs are those of fsspec (`s3://`, `gs://`, `hf://`, `https://`, ...), with the credentials that the
backend finds. The name of a copy contains a digest of the URL and of its version: size, entity tag
and time stamps, whichever the store reports. A changed file is fetched anew; old copies stay until
the user removes them. Several processes may fetch the same file: each writes a temporary file and
renames it, so that no process reads a partial copy.

The driver reads each file once per run. If the disk is slow, `XDG_CACHE_HOME=/dev/shm/...` puts the
copies, also of `file://` paths, into shared memory. fsspec's own `filecache` is not used, because
concurrent processes overwrite each other's index of it.
"""

from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

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


def fetch_to_cache(url: str, folder: Path, *, key: str) -> Path:
    """Return the path of the local copy, fetching the file if it is not cached.

    The copy's name ends with the file's name, whose suffix gives the format.

    Raises:
        ValueError: the fsspec URL, which the configuration key `key` sets, cannot be read.
    """
    import fsspec

    expected = (
        "a URL that this machine may read, with the package for it installed, credentials and a "
        "network connection"
    )
    with reading(key, url, expected, "it cannot be read"):
        fs, path = fsspec.url_to_fs(url)
        info = fs.info(path)
        version = [(name, str(info[name])) for name in _VERSION_FIELDS if name in info]
        name = f"{_digest(url)}-{_digest(version)}-{PurePosixPath(path).name}"
        copy = folder / name
        if not copy.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _download(fs, path, copy)
    return copy


def _download(fs: fsspec.AbstractFileSystem, path: str, target: Path) -> None:
    # Not `atomic_path`: several processes may fetch the same file, so each needs a name of its own.
    fd, partial = tempfile.mkstemp(prefix=".partial-", dir=target.parent)
    os.close(fd)
    try:
        fs.get_file(path, partial)
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _digest(text: object) -> str:
    return sha256(str(text).encode()).hexdigest()[:_DIGEST_CHARS]

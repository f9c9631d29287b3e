"""Remote files, kept on this machine: one copy of each version, whole or not there.

URLs are fsspec's (`s3://`, `gs://`, `hf://`, `https://`, ...); credentials are found as the
package behind a scheme finds them. A copy is named by URL and version: size, entity tag, time
stamp, whichever of them the store tells. A changed file is fetched anew; older copies stay until
somebody removes the folder. Several processes may ask for one file at once: each writes a file
of its own and renames it, so nobody ever reads half of one. A run reads each file once, in the
driver, so that a second copy in shared memory would be read once too; where the disk is slow,
`XDG_CACHE_HOME=/dev/shm/...` stages the copies there, those of `file://` paths as well, which
are copied for nothing else. fsspec's own `filecache` has one
index of all files, which processes write over each other.
"""

from __future__ import annotations

import os
import tempfile
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import fsspec

_MARKS = (
    *("size", "etag", "ETag", "Content-MD5", "Digest", "md5Hash", "generation", "blob_id", "lfs"),
    *("LastModified", "last_modified", "mtime", "created"),
)
"""What stores call the marks of a version. Others, such as a signed address, change every time."""

_SHOWN = 16
"""Characters of a digest in a file's name: 64 bits."""


def local_copy(url: str, folder: Path, *, key: str) -> Path:
    """Where the file lies now; fetched if it is not there yet. `key` names the setting.

    Keeps the end of the file's name, which says what it holds. Raises ValueError for a URL that
    cannot be read.
    """
    import aiohttp
    import fsspec

    try:
        fs, path = fsspec.url_to_fs(url)
        told = fs.info(path)
        version = [(mark, str(told[mark])) for mark in _MARKS if mark in told]
        name = f"{_digest(url)}-{_digest(version)}-{PurePosixPath(path).name}"
        kept = folder / name
        if not kept.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _fetch(fs, path, kept)
    except ImportError as error:
        raise ValueError(
            f"{key}={url}: {error}; expected the package that reads such URLs to be installed"
        ) from error
    except (OSError, RuntimeError, ValueError, aiohttp.ClientError) as error:
        raise ValueError(
            f"{key}={url}: it cannot be read: {type(error).__name__}: {error}; expected a file "
            "that this machine may read; probable cause: a mistyped URL, no credentials, or no way "
            "to it from here"
        ) from error
    return kept


def _fetch(fs: fsspec.AbstractFileSystem, path: str, kept: Path) -> None:
    number, partial = tempfile.mkstemp(prefix=".partial-", dir=kept.parent)
    os.close(number)
    try:
        fs.get_file(path, partial)
        os.replace(partial, kept)
    finally:
        Path(partial).unlink(missing_ok=True)


def _digest(text: object) -> str:
    return sha256(str(text).encode()).hexdigest()[:_SHOWN]

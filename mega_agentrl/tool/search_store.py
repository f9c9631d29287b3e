"""The folder an index of a corpus lies in: built once, whole or not at all, then only read.

Its name holds a digest of the corpus's bytes and of the index's format, so a changed corpus gets
a new index. Whoever comes first takes a lock file, builds in a temporary folder beside, writes
everything through to the disk and renames it; others wait for the lock, at most a deadline, and
find it built. The lock goes with the process that holds it, and so does the claim to what a
killed one left half built: the next builder removes that. Indexes of older corpora are left.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import tantivy

from mega_agentrl.tool.file_lock import hold
from mega_agentrl.tool.search_index import SearchIndex, iterate_corpus

if TYPE_CHECKING:
    from pathlib import Path

BUILD_WAIT_S = 3600.0

_FORMAT = 1
_READ_BYTES = 1 << 20


def open_index(corpus: Path, folder: Path, wait_s: float = BUILD_WAIT_S) -> SearchIndex:
    """The index of `corpus` below `folder`, built if it is not there yet.

    wait_s: for another process that builds it. Raises `ValueError` for a missing or malformed
    corpus and for a folder that cannot be written, `TimeoutError` where the other takes longer.
    """
    if not corpus.is_file():
        next(iterate_corpus(corpus))
    place = folder / f"{corpus.name}.{_digest(corpus)}.index"
    if not place.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with hold(place.with_name(f"{place.name}.lock"), wait_s):
                if not place.is_dir():
                    _build(corpus, place)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"tool.search.source={corpus}: its index cannot be made in {folder} ({error}), "
                "expected a folder that can be written; probable cause: it is another user's, or "
                "on a read-only disk"
            ) from error
    return SearchIndex.open(place)


def can_write(folder: Path) -> bool:
    """True where a file can be made in that folder."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _digest(corpus: Path) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {tantivy.__version__}\n".encode())
    with corpus.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()[:16]


def _build(corpus: Path, place: Path) -> None:
    """Build under the lock: whatever bears the temporary name is a dead process's."""
    building = place.with_name(f"{place.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        SearchIndex(iterate_corpus(corpus), building)
        for path in building.iterdir():
            path.chmod(0o644)
            _write_through(path)
        _write_through(building)
        building.rename(place)
        _write_through(place.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

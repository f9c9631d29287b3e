"""The folder that holds a corpus's index: built once, entirely or not at all, then only read.

The folder's name contains a digest of the corpus and of the index format, so a changed corpus gets
a new index. The first process takes a lock file, builds in a temporary folder beside, syncs
everything to disk and renames it; others wait for the lock, at most a timeout, and find the index.
The lock is released when its holder dies, and the next builder removes what a killed one left half
built. Indexes of older corpora are kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import tantivy

from mega_agentrl.tool.file_lock import hold_file_lock
from mega_agentrl.tool.search.local_index import SearchIndex, iter_corpus

if TYPE_CHECKING:
    from pathlib import Path

BUILD_TIMEOUT_S = 3600.0

_FORMAT_VERSION = 1
_READ_CHUNK_BYTES = 1 << 20


def open_or_build_index(
    corpus: Path, folder: Path, timeout_s: float = BUILD_TIMEOUT_S
) -> SearchIndex:
    """Return the index of `corpus` below `folder`, building it if it does not exist.

    Args:
        corpus: JSONL file.
        folder: parent folder of the index.
        timeout_s: how long to wait for another process that builds it.

    Raises:
        ValueError: the corpus is missing or malformed, or the folder cannot be written.
        TimeoutError: the other process takes longer.
    """
    if not corpus.is_file():
        next(iter_corpus(corpus))
    index_folder = folder / f"{corpus.name}.{_corpus_digest(corpus)}.index"
    if not index_folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with hold_file_lock(index_folder.with_name(f"{index_folder.name}.lock"), timeout_s):
                if not index_folder.is_dir():
                    _build_index(corpus, index_folder)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"tool.search.source={corpus}: its index cannot be created in {folder} ({error}), "
                "expected a writable folder; probable cause: it belongs to another user, or is "
                "on a read-only disk"
            ) from error
    return SearchIndex.open(index_folder)


def is_writable(folder: Path) -> bool:
    """Return whether a file can be created in that folder."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _corpus_digest(corpus: Path) -> str:
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {tantivy.__version__}\n".encode())
    with corpus.open("rb") as file:
        while chunk := file.read(_READ_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def _build_index(corpus: Path, index_folder: Path) -> None:
    """Build the index; under the lock, an old temporary folder is a dead process's."""
    building = index_folder.with_name(f"{index_folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        SearchIndex(iter_corpus(corpus), building)
        for path in building.iterdir():
            path.chmod(0o644)
            _fsync(path)
        _fsync(building)
        building.rename(index_folder)
        _fsync(index_folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

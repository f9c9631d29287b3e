"""Append-only file of finished trees, from which a run restores them after a crash.

A restarted run samples again everything after its last checkpoint. Prompts and seeds are the same
then, so a finished tree is restored from this file instead, if the weight versions of its tokens
are close enough to the version served now. A record is

    length and crc32 of the rest (8 bytes each, little-endian), pickled (step, key, versions, tree)

where `versions` are the oldest and the newest version of its tokens. Incomplete records, as
`kill -9` may leave at the end, are cut off. Trees are stored without scores, which are computed
again, and only if no trajectory failed, so that failed ones are sampled again. Never read a file
from an untrusted source: unpickling runs code. A store is thread-safe: rollouts add trees while a
checkpoint drops others.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mega_agentrl.types.records import Prompt, RolloutTree

_RECORD_HEADER = struct.Struct("<QQ")


class TreeStore:
    """Stores trees by step and key (name of the prompt in its step) in the file `path`."""

    def __init__(self, path: Path) -> None:
        """Index the records of the file; an incomplete one at the end is cut off."""
        self._path = path
        self._lock = threading.RLock()
        self._index: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
        end = 0
        for start, body in _iter_records(path):
            step, key, versions, _ = pickle.loads(body)
            self._index[step, key] = (versions, start)
            end = start + _RECORD_HEADER.size + len(body)
        if path.exists() and path.stat().st_size > end:
            os.truncate(path, end)

    def __len__(self) -> int:
        return len(self._index)

    def put(self, step: str, key: str, version: int, tree: RolloutTree) -> None:
        """Store a finished tree, unless one of its trajectories failed.

        Args:
            step: Name of the pass.
            key: Name of the prompt, unique in the pass.
            version: Weight version of a tree without sampled tokens.
            tree: The tree, unscored.
        """
        sampled = {
            token_version
            for one in tree.trajectories
            for token_version, by_policy in zip(one.versions, one.loss_mask, strict=True)
            if by_policy
        }
        if any(one.failed for one in tree.trajectories):
            return
        versions = (min(sampled, default=version), max(sampled, default=version))
        body = pickle.dumps((step, key, versions, tree), protocol=pickle.HIGHEST_PROTOCOL)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self._path.open("ab") as file:
            self._index[step, key] = (versions, file.tell())
            file.write(_RECORD_HEADER.pack(len(body), zlib.crc32(body)) + body)

    def get(
        self, step: str, key: str, prompt: Prompt, *, oldest: int, newest: int
    ) -> RolloutTree | None:
        """Restore the tree of a prompt, or return None if there is no suitable one.

        Args:
            step: Name of the pass.
            key: Name of the prompt, unique in the pass.
            prompt: The prompt; the tree refers to this object and not to a copy.
            oldest: Oldest permitted weight version of its tokens.
            newest: Newest permitted weight version of its tokens.
        """
        with self._lock:
            versions, start = self._index.get((step, key), (None, 0))
            if versions is None or versions[0] < oldest or versions[1] > newest:
                return None
            _, body = next(_iter_records(self._path, start))
        tree: RolloutTree = pickle.loads(body)[3]
        if tree.prompt != prompt:
            return None
        tree.prompt = prompt
        for one in tree.trajectories:
            one.prompt = prompt
        return tree

    def drop_steps(self, steps: frozenset[str] | None = None) -> None:
        """Drop the trees of steps that a checkpoint covers; None drops all."""
        with self._lock:
            self._rewrite_with(
                [entry for entry in self._index if steps is not None and entry[0] not in steps]
            )

    def drop_newer_than(self, version: int) -> None:
        """Drop trees with newer tokens; these weights are lost and their versions are reused."""
        with self._lock:
            self._rewrite_with(
                [entry for entry, ((_, last), _) in self._index.items() if last <= version]
            )

    def _rewrite_with(self, entries: list[tuple[str, str]]) -> None:
        if not entries:
            self._index = {}
            self._path.unlink(missing_ok=True)
            return
        if len(entries) == len(self._index):
            return
        temporary = self._path.with_suffix(".partial")
        index = {}
        with temporary.open("wb") as file:
            for step, key in entries:
                versions, start = self._index[step, key]
                _, body = next(_iter_records(self._path, start))
                index[step, key] = (versions, file.tell())
                file.write(_RECORD_HEADER.pack(len(body), zlib.crc32(body)) + body)
        temporary.replace(self._path)
        self._index = index

    @property
    def steps(self) -> frozenset[str]:
        """Steps that have stored trees."""
        with self._lock:
            return frozenset(step for step, _ in self._index)


def _iter_records(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield offset and pickled part of each complete record from offset `start` on."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        while len(head := file.read(_RECORD_HEADER.size)) == _RECORD_HEADER.size:
            length, crc = _RECORD_HEADER.unpack(head)
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != crc:
                return
            yield start, body
            start += _RECORD_HEADER.size + length

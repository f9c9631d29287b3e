"""Finished trees on disk until the checkpoint that makes them needless; one append-only file.

A run that goes on after a crash samples again what it had after its last checkpoint. The prompts
and their random streams are the same then, so a tree that had finished is taken from here, where
the weight versions of its tokens are near enough to the one that is served now. A record is

    length and crc32 of the rest (8 bytes each, little-endian), pickled (step, key, versions, tree)

and counts when it is whole: what `kill -9` leaves of the last one is cut off. `versions` are those
of its oldest and of its newest token. Trees are kept as grown, without scores, which are cheap or
somebody else's and are given again. Not kept are trees with a failed trajectory, which get another
chance. The file is the run's own: never read one from elsewhere, as pickles are programs. Two
threads may use a store: rollouts fill it while a checkpoint makes what it has needless.
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

_HEAD = struct.Struct("<QQ")


class TreeStore:
    """Trees by step and key (the prompt's name in its step), in the file `path`."""

    def __init__(self, path: Path) -> None:
        """Take up what the file holds; cuts off a record that was not finished."""
        self._path = path
        self._lock = threading.RLock()
        self._places: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
        end = 0
        for start, body in _records(path):
            step, key, versions, _ = pickle.loads(body)
            self._places[step, key] = (versions, start)
            end = start + _HEAD.size + len(body)
        if path.exists() and path.stat().st_size > end:
            os.truncate(path, end)

    def __len__(self) -> int:
        return len(self._places)

    def put(self, step: str, key: str, version: int, tree: RolloutTree) -> None:
        """Keep a tree that has just finished, if it is one to be used again.

        version: of a tree of which the policy sampled nothing.
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
            self._places[step, key] = (versions, file.tell())
            file.write(_HEAD.pack(len(body), zlib.crc32(body)) + body)

    def find(
        self, step: str, key: str, prompt: Prompt, *, oldest: int, newest: int
    ) -> RolloutTree | None:
        """The tree of that prompt, with this very object as its prompt; None without one.

        oldest, newest: weight versions that its tokens may be of.
        """
        with self._lock:
            versions, start = self._places.get((step, key), (None, 0))
            if versions is None or versions[0] < oldest or versions[1] > newest:
                return None
            _, body = next(_records(self._path, start))
        tree: RolloutTree = pickle.loads(body)[3]
        if tree.prompt != prompt:
            return None
        tree.prompt = prompt
        for one in tree.trajectories:
            one.prompt = prompt
        return tree

    def forget(self, steps: frozenset[str] | None = None) -> None:
        """A checkpoint has these steps, None: all; their trees are not needed any more."""
        with self._lock:
            self._leave(
                [place for place in self._places if steps is not None and place[0] not in steps]
            )

    def forget_newer(self, version: int) -> None:
        """Policies beyond that version are lost: others will have their numbers."""
        with self._lock:
            self._leave(
                [place for place, ((_, last), _) in self._places.items() if last <= version]
            )

    def _leave(self, left: list[tuple[str, str]]) -> None:
        if not left:
            self._places = {}
            self._path.unlink(missing_ok=True)
            return
        if len(left) == len(self._places):
            return
        temporary = self._path.with_suffix(".partial")
        places = {}
        with temporary.open("wb") as file:
            for step, key in left:
                versions, start = self._places[step, key]
                _, body = next(_records(self._path, start))
                places[step, key] = (versions, file.tell())
                file.write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        temporary.replace(self._path)
        self._places = places

    @property
    def steps(self) -> frozenset[str]:
        """Of the trees that are kept."""
        with self._lock:
            return frozenset(step for step, _ in self._places)


def _records(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Where each whole record from `start` on begins, and its pickled part."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != crc:
                return
            yield start, body
            start += _HEAD.size + length

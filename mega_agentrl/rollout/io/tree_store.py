"""Append-only file of finished trees, from which a run restores them after a crash.

A restarted run samples again everything after its last checkpoint. Prompts and seeds are the same
then, so a finished tree is restored from this file instead, if the weight versions of its tokens
are close enough to the version served now. The file is a `types.journal` of pickled (step, key,
versions, tree), where `versions` are the oldest and the newest version of its tokens. Trees are
stored without scores, which are computed again, and only if no trajectory failed, so that failed
ones are sampled again. Never read a file from an untrusted source: unpickling runs code. A store is
thread-safe: rollouts add trees while a checkpoint drops others.
"""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING

from mega_agentrl.types.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.types.records import Prompt, RolloutTree


class TreeStore:
    """Stores trees by step and key (name of the prompt in its step) in the file `path`."""

    def __init__(self, path: Path) -> None:
        """Index the records of the file."""
        self._journal = Journal(path)
        self._lock = threading.RLock()
        # Versions and offset by step and key.
        self._index: dict[tuple[str, str], tuple[tuple[int, int], int]] = {}
        for offset, body in self._journal.recover():
            step, key, versions, _ = pickle.loads(body)
            self._index[step, key] = (versions, offset)

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
            for trajectory in tree.trajectories
            for token_version, mask in zip(trajectory.versions, trajectory.loss_mask, strict=True)
            if mask
        }
        if any(trajectory.failed for trajectory in tree.trajectories):
            return
        versions = (min(sampled, default=version), max(sampled, default=version))
        body = pickle.dumps((step, key, versions, tree), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._index[step, key] = (versions, self._journal.append(body))

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
            versions, offset = self._index.get((step, key), (None, 0))
            if versions is None or versions[0] < oldest or versions[1] > newest:
                return None
            body = self._journal.read(offset)
        tree: RolloutTree = pickle.loads(body)[3]
        if tree.prompt != prompt:
            return None
        tree.prompt = prompt
        for trajectory in tree.trajectories:
            trajectory.prompt = prompt
        return tree

    def drop_steps(self, steps: frozenset[str] | None = None) -> None:
        """Drop the trees of steps that a checkpoint covers; None drops all."""
        with self._lock:
            self._rewrite_with(
                [entry for entry in self._index if steps is not None and entry[0] not in steps]
            )

    def drop_newer_than(self, version: int) -> None:
        """Drop trees with newer tokens: their weights are lost and the versions will be reused."""
        with self._lock:
            self._rewrite_with(
                [entry for entry, ((_, last), _) in self._index.items() if last <= version]
            )

    def _rewrite_with(self, entries: list[tuple[str, str]]) -> None:
        if not entries:
            self._index = {}
            self._journal.path.unlink(missing_ok=True)
            return
        if len(entries) == len(self._index):
            return
        offsets = self._journal.rewrite(
            self._journal.read(self._index[entry][1]) for entry in entries
        )
        self._index = {
            entry: (self._index[entry][0], offset)
            for entry, offset in zip(entries, offsets, strict=True)
        }

    @property
    def steps(self) -> frozenset[str]:
        """Steps that have stored trees."""
        with self._lock:
            return frozenset(step for step, _ in self._index)

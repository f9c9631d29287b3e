"""A checkpoint whose files the ranks write while the run goes on, and its commit by the driver.

    start    every rank copies its state; then training may change it
    write    threads of the ranks write to `step-000020.partial-1f0c/` and report sizes and digests
    commit   the driver renames the folder and adds the manifest, when all ranks have reported

Until the commit the previous checkpoint is the newest, whoever fails or is killed. The critic's
part is committed before the policy's, whose manifest makes both a checkpoint of the run.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any

from mega_agentrl.actor.checkpoint import checkpoint_dir as checkpoint_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mega_agentrl.types.protocols import Critic, Policy

SAVE_TIMEOUT_S = 1800.0
"""Default for the longest time in seconds that a commit waits for the files."""
_POLL_INTERVAL_S = 1.0


class ModelSave:
    """The part of one model; creating it starts the save.

    Raises:
        ValueError: `folder` is a checkpoint or holds other files, or `extra` is not JSON.
        RuntimeError: A rank failed.
    """

    def __init__(
        self, model: Policy | Critic, folder: Path, extra: Mapping[str, Any], keep: int | None
    ) -> None:
        """Create the temporary folder and start the ranks.

        Args:
            model: The model to save.
            folder: Folder of the checkpoint.
            extra: JSON values that a load returns.
            keep: Number of checkpoints to keep, including this one; None keeps all.
        """
        self.folder = folder
        self._model = model
        self._extra = checkpoint_folder.to_json_dict(extra, "extra")
        self._keep = keep
        self._files: Mapping[str, Any] | None = None
        self._partial_folder = checkpoint_folder.create_partial_folder(folder, token_hex(4))
        try:
            self._manifest = model.start_save(self._partial_folder)
        except BaseException:
            shutil.rmtree(self._partial_folder, ignore_errors=True)
            raise

    def is_written(self, wait_s: float) -> bool:
        """Return whether all ranks are done, after at most `wait_s` seconds."""
        if self._files is None:
            self._files = self._model.save_result(wait_s)
        return self._files is not None

    def commit(self) -> None:
        """Turn the written folder into a checkpoint, and remove older ones."""
        assert self._files is not None, "commit before the files are written"
        manifest = replace(
            self._manifest,
            files=dict(self._files),
            number=checkpoint_folder.next_checkpoint_number(self.folder.parent),
            extra=self._extra,
        )
        checkpoint_folder.commit_folder(self._partial_folder, self.folder, manifest)
        if self._keep is not None:
            checkpoint_folder.prune_checkpoints(self.folder.parent, self._keep)

    def abandon(self) -> None:
        """Stop the ranks and remove the temporary folder, which frees the space."""
        with suppress(RuntimeError):  # a rank is dead, and writes no more
            self._model.abandon_save()
        shutil.rmtree(self._partial_folder, ignore_errors=True)


class PendingCheckpoint:
    """A checkpoint of the run after `step`, in parts that are committed in order."""

    def __init__(self, step: int, parts: Sequence[ModelSave]) -> None:
        self.step = step
        """Finished RL steps."""
        self._parts = list(parts)

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint: that of the last part."""
        return self._parts[-1].folder

    def commit_if_written(self) -> bool:
        """Commit if the ranks are done; return whether they are.

        Raises:
            RuntimeError: A rank failed; the caller abandons the checkpoint.
            OSError: The folder cannot be committed.
        """
        return self._commit(wait_s=0.0)

    def commit(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Wait for the ranks and commit.

        Raises:
            TimeoutError: The ranks are not done after `timeout_s`; and as `commit_if_written`.
        """
        deadline = monotonic() + timeout_s
        while not self._commit(_POLL_INTERVAL_S):
            if monotonic() > deadline:
                raise TimeoutError(f"{self.folder}: not written after {timeout_s:g} s")

    def abandon(self) -> None:
        """Stop the ranks and remove the temporary folders."""
        for part in self._parts:
            part.abandon()

    def _commit(self, wait_s: float) -> bool:
        if not all(part.is_written(wait_s) for part in self._parts):
            return False
        for part in self._parts:
            part.commit()
        return True

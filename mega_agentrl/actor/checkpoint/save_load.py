"""Saving and loading of the training state, under the same or another parallel layout.

A checkpoint contains weights, float32 master weights, moments, step counts, random state
(`checkpoint.sharded_state`) and the caller's `extra` values, but not the frozen reference or the
learning rate settings.

    start    every rank: views of its state, then a barrier
    write    every rank, in a thread: its file in a temporary folder, read back
    commit   rank 0: global metadata, size check, rename, manifest, pruning

The writing thread uses no collectives, which would hang if a rank dies, and the caller waits for it
with a deadline, even if the disk hangs. If a rank dies or fails meanwhile, the save fails on all
ranks within `save_barrier.HEARTBEAT_TIMEOUT_S`, and earlier checkpoints are unchanged.
"""

from __future__ import annotations

import pickle
import shutil
import threading
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mega_agentrl.actor.checkpoint import checkpoint_dir, sharded_state
from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest
from mega_agentrl.actor.checkpoint.save_barrier import SaveBarrier
from mega_agentrl.actor.checkpoint.torch_dist_reader import read_sharded_state
from mega_agentrl.actor.checkpoint.torch_dist_writer import finalize_checkpoint, write_rank_file
from mega_agentrl.actor.parallel.process_groups import connect_store
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.reshard.session import wait_for_all
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.actor.megatron_model import MegatronModel

SAVE_TIMEOUT_S = 1800.0
_POLL_INTERVAL_S = 0.1
_STOP_TIMEOUT_S = 10.0


def save_checkpoint(
    model: MegatronModel,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> Path:
    """Write a checkpoint and wait for it; all ranks call this.

    Args:
        model: The model to save.
        folder: An unused name inside the run's checkpoint folder, on storage that all ranks
            share.
        extra: JSON values that `load_checkpoint` returns; those of rank 0 are stored.
        keep: Number of checkpoints to keep in the run's folder, including this one; None keeps
            all.
        timeout_s: Longest time to wait for all ranks.

    Returns:
        The checkpoint's folder.

    Raises:
        RuntimeError: If a rank fails or dies.
        TimeoutError: After `timeout_s`.
    """
    with track_activity("writing of the checkpoint", model.groups.describe_peers("all")):
        state = sharded_state.sharded_state_to_save(model)
        manifest = _make_manifest(model, checkpoint_dir.to_json_dict(extra or {}, "extra"))
        model.groups.barrier("checkpoint saves")
        expected = sharded_state.stored_shapes(model)
        return _SaveJob(Path(folder), state, expected, manifest, keep).result(timeout_s)


def load_checkpoint(model: MegatronModel, folder: str | Path) -> dict[str, Any]:
    """Load a checkpoint of the same model and return its `extra` values; all ranks call this.

    Each rank reads its own parts of the state, and some of the files to compare their digests.

    Raises:
        ValueError: On all ranks, before anything has changed, if the checkpoint is unfinished,
            damaged or of another model.
    """
    folder = Path(folder)
    manifest = CheckpointManifest.read(folder)
    manifest.require_shape(folder, model.shape, "model.path")
    manifest.require_lora(folder, model.lora)
    if manifest.freeze_vision and not model.config.model.freeze_vision:
        raise ConfigError(
            "model.freeze_vision",
            False,
            f"true to resume checkpoint {folder}, which has no optimizer state of the vision tower",
            "another configuration of the run (start a new one from its exported weights to train "
            "the tower)",
        )
    with track_activity("check of the checkpoint", model.groups.describe_peers("all")):
        _check_files_on_all_ranks(folder, manifest, model.groups.timeout_s)
    masters = sharded_state.has_master_weights(getattr(torch, manifest.dtype))
    state = sharded_state.sharded_state_to_load(
        model,
        masters=masters,
        num_ranks=manifest.num_ranks,
        freeze_vision=manifest.freeze_vision,
    )
    # Not validated again: sizes and coverage were checked by the save, the shape above.
    with track_activity("reading of the checkpoint", model.groups.describe_peers("all")):
        objects = read_sharded_state(state, folder)
    sharded_state.restore_rng_state(objects[sharded_state.RNG])
    if model.is_trainable:
        model.optimizer.set_num_steps(manifest.num_adam_steps)
    model.num_steps = manifest.num_steps
    return manifest.extra


def _check_files_on_all_ranks(folder: Path, manifest: CheckpointManifest, timeout_s: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = sorted(manifest.files)[rank::size]
    damage = checkpoint_dir.find_damage(folder, manifest, names, contents=True)
    store = connect_store("checkpoint/checks")
    if damage is not None:
        store.set("damage", pickle.dumps(damage))
    wait_for_all(store, size, timeout_s)
    if store.check(["damage"]):
        raise pickle.loads(store.get("damage"))


def _make_manifest(model: MegatronModel, extra: dict[str, Any]) -> CheckpointManifest:
    return CheckpointManifest(
        number=0,
        num_steps=model.num_steps,
        num_adam_steps=model.optimizer.num_steps,
        num_ranks=dist.get_world_size(),
        layout=asdict(model.config.parallel),
        dtype=str(model.dtype).removeprefix("torch."),
        shape=checkpoint_dir.to_json_dict(asdict(model.shape), "shape"),
        files={},
        extra=extra,
        freeze_vision=model.config.model.freeze_vision,
        lora=None if model.lora is None else checkpoint_dir.lora_record(model.lora),
    )


class _SaveJob:
    """One running save: a thread that writes this rank's file and waits for the other ranks.

    The thread ends when all ranks are done or when the `SaveBarrier` reports a failure.
    """

    def __init__(
        self,
        folder: Path,
        state: dict[str, Any],
        expected: dict[str, tuple[int, ...]],
        manifest: CheckpointManifest,
        keep: int | None,
    ) -> None:
        self.folder = folder
        self._state = state
        self._expected_shapes = expected
        self._manifest = manifest
        self._num_to_keep = keep
        self._rank = dist.get_rank()
        description = f"saving checkpoint {folder}"
        self._barrier = SaveBarrier(
            connect_store("checkpoint/saves"), self._rank, manifest.num_ranks, description
        )
        self._future: Future[Path] = Future()
        threading.Thread(target=self._run, name="checkpoint-writer", daemon=True).start()

    def result(self, timeout_s: float) -> Path:
        """Wait for the save and return the checkpoint's folder; errors as in `save_checkpoint`."""
        deadline = monotonic() + timeout_s
        while not self._future.done() and self._barrier.error is None:
            if monotonic() > deadline:
                missing_ranks = self._barrier.missing_ranks()
                message = (
                    f"not finished after {timeout_s:g} s; ranks that are not done: {missing_ranks}"
                )
                self._barrier.fail(message)
                raise TimeoutError(self._barrier.error)
            try:
                self._future.exception(_POLL_INTERVAL_S)
            except TimeoutError:
                continue
        # After an error the thread ends at its next call of the barrier, unless a write hangs.
        if not wait([self._future], _STOP_TIMEOUT_S).done:
            raise RuntimeError(self._barrier.error)
        return self._future.result()

    def _run(self) -> None:
        try:
            folder = self._write_checkpoint()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: handed to the caller
            self._barrier.fail(f"{type(error).__name__}: {error}")
            failure = RuntimeError(self._barrier.error)
            failure.__cause__ = error
            self._release()
            self._future.set_exception(failure)
        else:
            self._release()
            self._future.set_result(folder)

    def _release(self) -> None:
        """Close the barrier, so that no thread uses the store when the caller gets the result."""
        self._barrier.close()
        self._state = {}

    def _write_checkpoint(self) -> Path:
        if self._rank:
            write_rank_file(self._state, Path(self._barrier.wait_announcement()), self._rank)
            self._barrier.mark_done()
            self._barrier.wait_finished()
            return self.folder
        partial = checkpoint_dir.create_partial_folder(self.folder, token_hex(4))
        try:
            self._barrier.announce(str(partial))
            write_rank_file(self._state, partial, self._rank)
            self._barrier.mark_done()
            self._barrier.wait_all_done()
            self._commit(partial)
        except BaseException:
            # Frees the space: the disk may be full.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._barrier.finish()
        return self.folder

    def _commit(self, partial: Path) -> None:
        """Turn the written folder into a checkpoint; rank 0, when all ranks are done."""
        run_folder = self.folder.parent
        manifest = replace(
            self._manifest,
            files=finalize_checkpoint(partial, self._manifest.num_ranks, self._expected_shapes),
            number=checkpoint_dir.next_checkpoint_number(run_folder),
        )
        checkpoint_dir.commit_folder(partial, self.folder, manifest)
        if self._num_to_keep is not None:
            checkpoint_dir.prune_checkpoints(run_folder, self._num_to_keep)

"""Saving and loading of the training state, under the same or another parallel layout.

A checkpoint contains weights, float32 master weights, moments, step counts, random state
(`checkpoint.sharded_state`) and the caller's `extra` values, but not the frozen reference or the
learning rate settings.

    start    every rank: copies its state to host memory; training goes on
    write    every rank, in a thread: its file in a temporary folder; rank 0: the global metadata
    commit   driver, when all ranks are done: size check, rename, manifest, pruning
             (`train.resume.pending_checkpoint`)

The writing threads use no collectives, which would hang if a rank dies: rank 0 waits for the other
files at the job's store, until the driver, which notices the death of a rank, abandons the save.
The copy stays in host memory (`HostBlocks`): with CUDA for the next save, else until it is written.
"""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mega_agentrl.actor import device
from mega_agentrl.actor.checkpoint import checkpoint_dir, sharded_state
from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest
from mega_agentrl.actor.checkpoint.torch_dist_reader import read_sharded_state
from mega_agentrl.actor.checkpoint.torch_dist_writer import finalize_checkpoint, write_rank_file
from mega_agentrl.actor.parallel.process_groups import connect_store
from mega_agentrl.actor.training.offload import BLOCK_BYTES, HostBlocks
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.reshard.session import wait_for_all
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from mega_agentrl.actor.checkpoint.checkpoint_dir import FileRecord
    from mega_agentrl.actor.megatron_model import MegatronModel

_POLL_INTERVAL_S = 0.1
_STOP_TIMEOUT_S = 10.0


class CheckpointWriter:
    """Copies the state of a rank to host memory and writes it in a thread, one save at a time."""

    def __init__(self) -> None:
        self._host_blocks = HostBlocks(BLOCK_BYTES)
        self._thread: threading.Thread | None = None
        self._future: Future[dict[str, FileRecord]] = Future()
        self._is_abandoned = threading.Event()
        self._description = ""

    def start(self, model: MegatronModel, folder: Path) -> CheckpointManifest:
        """Start a save; all ranks call this, and the state may change when it has returned.

        Args:
            model: The model to save.
            folder: The empty folder of the save, on storage that all ranks share; its name is
                unique to this attempt.

        Returns:
            The manifest, without the files and what only the run knows.

        Raises:
            RuntimeError: The thread of an earlier save still hangs in a write.
        """
        rank = dist.get_rank()
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError(f"{self._description}: the thread of this save has not ended")
        self._description = f"saving checkpoint {folder}: rank {rank}"
        with track_activity("copy of the state for the checkpoint"):
            state = sharded_state.copy_state_to_host(model, self._host_blocks)
        manifest = _make_manifest(model)
        self._future, self._is_abandoned = Future(), threading.Event()
        job = _WriteJob(
            folder=folder,
            rank=rank,
            num_ranks=manifest.num_ranks,
            state=state,
            expected_shapes=sharded_state.stored_shapes(model),
            host_blocks=self._host_blocks,
            is_abandoned=self._is_abandoned,
            store=dist.distributed_c10d._get_default_store(),
        )
        self._thread = threading.Thread(
            target=job.run, args=(self._future,), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        return manifest

    def result(self, wait_s: float) -> dict[str, FileRecord] | None:
        """Return the records of the files that this rank has written; None if it has not yet.

        Raises:
            RuntimeError: The writing failed.
        """
        try:
            error = self._future.exception(wait_s)
        except TimeoutError:
            return None
        if error is not None:
            raise RuntimeError(f"{self._description}: {type(error).__name__}: {error}") from error
        return self._future.result()

    def abandon(self) -> None:
        """End the running save, if there is one; waits for the thread for a few seconds.

        A thread inside a call of the store at interpreter exit would abort the process.
        """
        self._is_abandoned.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)


@dataclass(slots=True, kw_only=True)
class _WriteJob:
    """Writes the files of one save, in a thread."""

    folder: Path
    rank: int
    num_ranks: int
    state: dict[str, Any]
    expected_shapes: dict[str, tuple[int, ...]]
    host_blocks: HostBlocks
    is_abandoned: threading.Event
    store: dist.Store

    def run(self, future: Future[dict[str, FileRecord]]) -> None:
        """Write the files and set the result of the future."""
        try:
            with track_activity("writing of the checkpoint"):
                files = self._write_files()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: handed to the caller
            self._release_copy()
            future.set_exception(error)
        else:
            future.set_result(files)

    def _write_files(self) -> dict[str, FileRecord]:
        # A connection of its own, which no blocking call of others holds up.
        store = dist.PrefixStore(f"checkpoint/{self.folder.name}", self.store.clone())
        files = write_rank_file(self.state, self.folder, self.rank, self._require_not_abandoned)
        self._release_copy()
        num_done = store.add("done", 1)
        if self.rank == 0:
            while num_done < self.num_ranks:
                self._require_not_abandoned()
                time.sleep(_POLL_INTERVAL_S)
                num_done = store.add("done", 0)
            files |= finalize_checkpoint(self.folder, self.num_ranks, self.expected_shapes)
        return files

    def _release_copy(self) -> None:
        self.state = {}
        if not device.has_cuda():
            self.host_blocks.free()

    def _require_not_abandoned(self) -> None:
        if self.is_abandoned.is_set():
            raise RuntimeError("the save was abandoned")


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


def _make_manifest(model: MegatronModel) -> CheckpointManifest:
    return CheckpointManifest(
        number=0,
        num_steps=model.num_steps,
        num_adam_steps=model.optimizer.num_steps,
        num_ranks=dist.get_world_size(),
        layout=asdict(model.config.parallel),
        dtype=str(model.dtype).removeprefix("torch."),
        shape=checkpoint_dir.to_json_dict(asdict(model.shape), "shape"),
        files={},
        freeze_vision=model.config.model.freeze_vision,
        lora=None if model.lora is None else checkpoint_dir.lora_record(model.lora),
    )

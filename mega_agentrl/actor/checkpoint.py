"""Saves a network's training state and takes it up again, under the same layout or another.

What is stored: weights, float32 masters, moments, step counts, random state (`checkpoint_state`)
and whatever the caller adds as `extra`. Not stored: the frozen reference and the learning
rate's settings, which come from where they came from at the start.

    start    every rank: barrier, then views (or host copies) of what it writes
    write    every rank, in a thread: its file into a temporary folder, read back
    close    rank 0: global metadata, sizes, rename, manifest, older checkpoints removed

The writing thread uses no collective, so training can go on beside it. A rank that dies or
fails meanwhile makes the save fail everywhere within `roll_call.SILENCE_S`, and the checkpoints
before it are as they were.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from mega_agentrl.actor import checkpoint_folder, checkpoint_state
from mega_agentrl.actor.checkpoint_files import assemble, write_share
from mega_agentrl.actor.checkpoint_folder import Manifest
from mega_agentrl.actor.roll_call import RollCall
from mega_agentrl.types.doing import doing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.actor.network import Network

SAVE_TIMEOUT_S = 1800.0
_LOOK_S = 0.1
_STOP_S = 10.0


def save(
    network: Network,
    folder: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> Path:
    """Write a checkpoint and wait for it; every rank calls it alike.

    folder: a free name inside the run's folder, on storage that all ranks share. extra: plain
    values, given back by `load`; rank 0's count. keep: how many checkpoints of the run's folder
    stay, this one included (None: all). Waits for: every rank. Raises `RuntimeError` where one
    fails or dies, `TimeoutError` after timeout_s.
    """
    saving = AsyncSave(network)
    with doing("writing of the checkpoint", network.groups.peers("all")):
        saving.start(folder, extra=extra, keep=keep, copy=False)
        return saving.wait(timeout_s)


class AsyncSave:
    """Saves beside training, one checkpoint at a time; every rank has one and calls it alike."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._job: _Job | None = None

    def start(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        copy: bool = True,
    ) -> None:
        """Begin; arguments as in `save`. copy: into host memory first.

        Without copy the network must be left alone until the end. Waits for: every rank to come
        here, and its own copy. Raises `ValueError` while another save is under way.
        """
        if self._job is not None:
            raise ValueError(
                f"save to {folder}: the save to {self._job.folder} is not over; expected a "
                "wait() or a poll() that says so before"
            )
        network, folder = self._network, Path(folder)
        state = checkpoint_state.to_save(network, copy=copy)
        manifest = _manifest(network, checkpoint_folder.as_json(extra or {}, "extra"))
        dist.barrier()
        expected = checkpoint_state.stored_shapes(network)
        self._job = _Job(folder, state, expected, manifest, keep)

    def poll(self) -> Path | None:
        """The checkpoint's folder once it stands, None before; raises what `wait` raises."""
        job = self._job
        if job is None or not job.is_over():
            return None
        return self.wait()

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> Path:
        """The finished checkpoint's folder. Raises as `save` does; another start is free then."""
        job = self._job
        if job is None:
            raise ValueError("wait for a checkpoint: none is being saved; expected a start before")
        try:
            return job.result(timeout_s)
        finally:
            self._job = None


def load(network: Network, folder: str | Path) -> dict[str, Any]:
    """Take up a checkpoint of the same model; every rank calls it alike. Returns `extra`.

    Each rank reads its own pieces, and a share of the files to compare their digests. Raises
    `ValueError`, on all ranks and before anything is changed, for an unfinished or damaged
    checkpoint or another model's.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    shape = checkpoint_folder.as_json(asdict(network.shape), "shape")
    if manifest.shape != shape:
        differing = [name for name in shape if manifest.shape.get(name) != shape[name]]
        raise ValueError(
            f"checkpoint {folder}: {', '.join(differing)} "
            f"{[manifest.shape.get(name) for name in differing]}, expected "
            f"{[shape[name] for name in differing]} of model.path; probable cause: another model"
        )
    with doing("check of the checkpoint", network.groups.peers("all")):
        _agree_on_damage(folder, manifest)
    masters = checkpoint_state.has_masters(getattr(torch, manifest.dtype))
    state = checkpoint_state.to_load(network, masters=masters, num_ranks=manifest.num_ranks)
    # Sizes and holes were checked when the checkpoint was written, and the model's shape above.
    with doing("reading of the checkpoint", network.groups.peers("all")):
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    checkpoint_state.take_rng(loaded[checkpoint_state.RNG])
    if network.trains:
        network.optimizer.resume(manifest.num_adam_steps)
    network.num_steps = manifest.num_steps
    return manifest.extra


def _agree_on_damage(folder: Path, manifest: Manifest) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = sorted(manifest.files)[rank::size]
    mine = checkpoint_folder.find_damage(folder, manifest, names, contents=True)
    found: list[str | None] = [None] * size
    dist.all_gather_object(found, mine)
    damage = next((message for message in found if message), None)
    if damage:
        raise ValueError(f"checkpoint {folder}: {damage}; probable cause: a damaged copy or disk")


def _manifest(network: Network, extra: dict[str, Any]) -> Manifest:
    return Manifest(
        number=0,
        num_steps=network.num_steps,
        num_adam_steps=network.optimizer.num_steps,
        num_ranks=dist.get_world_size(),
        layout=asdict(network.config.parallel),
        dtype=str(network.dtype).removeprefix("torch."),
        shape=checkpoint_folder.as_json(asdict(network.shape), "shape"),
        files={},
        extra=extra,
    )


class _Job:
    """One save under way. Produces: the folder, or an error, for `result`.

    Waits for: the other ranks' threads. Unblocked by: them, or the roll call.
    """

    def __init__(
        self,
        folder: Path,
        state: dict[str, Any],
        expected: dict[str, tuple[int, ...]],
        manifest: Manifest,
        keep: int | None,
    ) -> None:
        self.folder = folder
        self._state = state
        self._expected = expected
        self._manifest = manifest
        self._keep = keep
        self._rank = dist.get_rank()
        what = f"saving checkpoint {folder}"
        self._roll = RollCall(_store(), self._rank, manifest.num_ranks, what)
        self._future: Future[Path] = Future()
        threading.Thread(target=self._run, name="checkpoint-writer", daemon=True).start()

    def is_over(self) -> bool:
        return self._future.done() or self._roll.error is not None

    def result(self, timeout_s: float) -> Path:
        ends_at = monotonic() + timeout_s
        while not self.is_over():
            if monotonic() > ends_at:
                missing = self._roll.missing()
                message = f"not over after {timeout_s:g} s; ranks that are not done: {missing}"
                self._roll.fail(message)
                raise TimeoutError(self._roll.error)
            try:
                self._future.exception(_LOOK_S)
            except FutureTimeoutError:
                continue
        # After an error the writer stops at its next look, which also ends its calls of the store;
        # or it hangs in a write, and what it writes to is never read.
        if not wait([self._future], _STOP_S).done:
            raise RuntimeError(self._roll.error)
        return self._future.result()

    def _run(self) -> None:
        try:
            folder = self._write()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: handed to the caller
            self._roll.fail(repr(error))
            failure = RuntimeError(self._roll.error)
            failure.__cause__ = error
            self._end()
            self._future.set_exception(failure)
        else:
            self._end()
            self._future.set_result(folder)

    def _end(self) -> None:
        """Before the caller hears of it: no thread is left in the store then."""
        self._roll.close()
        self._state = {}

    def _write(self) -> Path:
        if self._rank:
            write_share(self._state, Path(self._roll.hear()), self._rank)
            self._roll.done()
            self._roll.wait_finished()
            return self.folder
        partial = checkpoint_folder.begin(self.folder, token_hex(4))
        try:
            self._roll.tell(str(partial))
            write_share(self._state, partial, self._rank)
            self._roll.wait_all()
            self._close(partial)
        except BaseException:
            # A full disk should not stay full.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._roll.finish()
        return self.folder

    def _close(self, partial: Path) -> None:
        """Rank 0, when all are done: from now on the folder is a checkpoint."""
        run_folder = self.folder.parent
        manifest = replace(
            self._manifest,
            files=assemble(partial, self._manifest.num_ranks, self._expected),
            number=checkpoint_folder.next_number(run_folder),
        )
        checkpoint_folder.finish(partial, self.folder, manifest)
        if self._keep is not None:
            checkpoint_folder.prune(run_folder, self._keep)


def _store() -> dist.Store:
    """A connection of this save's own to the job's store, under a prefix of its own.

    The prefix comes from a counter per rank, which counts alike everywhere because all ranks
    save alike.
    """
    store = dist.distributed_c10d._get_default_store().clone()
    number = store.add(f"checkpoint/saves/{dist.get_rank()}", 1)
    return dist.PrefixStore(f"checkpoint/{number}", store)

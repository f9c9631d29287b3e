"""A checkpoint that the ranks of a test save together, without a driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from mega_agentrl.actor.checkpoint import checkpoint_dir

WAIT_S = 300.0


def save_checkpoint(model, folder, extra=None, keep=None):
    """Start a save and commit it on rank 0, when all ranks are done; every rank calls this."""
    finish_save(model, folder, *start_save(model, folder), extra, keep)


def start_save(model, folder):
    """Start a save on every rank; return its temporary folder and the manifest."""
    partials = [None]
    if dist.get_rank() == 0:
        partials = [checkpoint_dir.create_partial_folder(Path(folder), "token")]
    dist.broadcast_object_list(partials)
    return partials[0], model.start_save(str(partials[0]))


def finish_save(model, folder, partial, manifest, extra=None, keep=None):
    """Wait for all ranks and commit their save."""
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, model.save_result(WAIT_S))
    if dist.get_rank() == 0:
        manifest = replace(
            manifest,
            number=checkpoint_dir.next_checkpoint_number(Path(folder).parent),
            files={name: record for files in by_rank for name, record in files.items()},
            extra=extra or {},
        )
        checkpoint_dir.commit_folder(partial, Path(folder), manifest)
        if keep is not None:
            checkpoint_dir.prune_checkpoints(Path(folder).parent, keep)
    dist.barrier()

"""A training checkpoint as a Hugging Face folder, in one process and without a process group.

The stored tensors already have Hugging Face's names and shapes (`checkpoint_state`), so this
reads them file by file and writes them; configuration and tokenizer are copied from the model's
folder. Memory: one weight file at a time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from mega_agentrl.actor.checkpoint_folder import Manifest, as_json, find_damage
from mega_agentrl.actor.checkpoint_state import MASTER, WEIGHT, has_masters, key
from mega_agentrl.actor.export import MAX_FILE_BYTES, write_weights
from mega_agentrl.reshard.checkpoint import (
    begin_export,
    building_folder,
    finish_export,
    plan_files,
)
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes

if TYPE_CHECKING:
    from pathlib import Path


def checkpoint_to_hf(
    checkpoint: Path,
    model: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `target`. model: folder that training started from.

    dtype: of the weights written (None: as trained); float32 takes the masters where there are
    any. Raises `ValueError` where the checkpoint is unfinished, damaged or of another model.
    """
    manifest, shape = Manifest.read(checkpoint), ModelShape.from_folder(model)
    if manifest.shape != as_json(asdict(shape), "shape"):
        raise ValueError(
            f"checkpoint {checkpoint}: its model's sizes are {manifest.shape}, expected those of "
            f"{model}: {asdict(shape)}; probable cause: another model's folder, or a critic's "
            "checkpoint"
        )
    damage = find_damage(checkpoint, manifest, manifest.files, contents=True)
    if damage:
        raise ValueError(f"checkpoint {checkpoint}: {damage}; probable cause: a damaged copy")
    trained = getattr(torch, manifest.dtype)
    dtype = dtype or trained
    kind = MASTER if has_masters(trained) and dtype == torch.float32 else WEIGHT
    shapes = hf_shapes(shape)
    plan = plan_files(
        [list(shapes)], shapes, element_bytes=dtype.itemsize, max_file_bytes=max_file_bytes
    )
    begin_export(target, model)
    for file in plan:
        state = {key(kind, name): torch.empty(shapes[name], dtype=dtype) for name in file.tensors}
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        tensors = {name: state[key(kind, name)] for name in file.tensors}
        write_weights(building_folder(target) / file.name, tensors)
    finish_export(target, plan, shapes, element_bytes=dtype.itemsize)

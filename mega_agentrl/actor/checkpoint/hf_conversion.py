"""Conversion of a training checkpoint to a Hugging Face folder, in a single process.

The stored tensors have Hugging Face's names and shapes (`checkpoint.sharded_state`), so they are
read and written file by file; configuration and tokenizer are copied from the model's folder.
At most one weight file is in memory at a time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from mega_agentrl.actor.checkpoint.checkpoint_dir import (
    CheckpointManifest,
    find_damage,
    to_json_dict,
)
from mega_agentrl.actor.checkpoint.hf_export import MAX_FILE_BYTES, write_safetensors
from mega_agentrl.actor.checkpoint.sharded_state import (
    MASTER,
    WEIGHT,
    has_master_weights,
    state_key,
)
from mega_agentrl.reshard.hf_checkpoint import (
    begin_export,
    finish_export,
    partial_folder,
    plan_files,
)
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    from pathlib import Path


def convert_checkpoint_to_hf(
    checkpoint: Path,
    model: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder.

    Args:
        checkpoint: Checkpoint folder.
        model: Hugging Face folder that training started from.
        target: Folder to write.
        dtype: Dtype of the written weights, by default that of training; float32 takes the
            master weights if there are any.
        max_file_bytes: Largest size of a weight file.

    Raises:
        ValueError: If the checkpoint is unfinished, damaged or of another model.
    """
    manifest, shape = CheckpointManifest.read(checkpoint), ModelShape.from_folder(model)
    if manifest.shape != to_json_dict(asdict(shape), "shape"):
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
    kind = MASTER if has_master_weights(trained) and dtype == torch.float32 else WEIGHT
    shapes = hf_shapes(shape)
    plan = plan_files(
        [list(shapes)], shapes, element_bytes=dtype.itemsize, max_file_bytes=max_file_bytes
    )
    begin_export(target, model)
    for file in plan:
        state = {
            state_key(kind, name): torch.empty(shapes[name], dtype=dtype) for name in file.tensors
        }
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
        tensors = {name: state[state_key(kind, name)] for name in file.tensors}
        write_safetensors(partial_folder(target) / file.name, tensors)
    finish_export(target, plan, shapes, element_bytes=dtype.itemsize)

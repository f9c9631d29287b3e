"""Writes the trained weights as a Hugging Face folder, without one place holding all of them.

Of the replicas of a rectangle only the first rank of the stage that holds it takes part. Tensor
by tensor, these ranks send their rectangles to the stage's first rank, which writes a file
whenever its share of the file plan is full. Global rank 0 copies configuration and tokenizer
before, and writes the index and renames the folder after.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mega_agentrl.actor import device
from mega_agentrl.actor.groups import Position
from mega_agentrl.reshard.checkpoint import (
    begin_export,
    building_folder,
    finish_export,
    plan_files,
)
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.reshard.place import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.config.schema import ParallelConfig
    from mega_agentrl.reshard.layout import Block
    from mega_agentrl.reshard.model_shape import ModelShape

MAX_FILE_BYTES = 2 * 1024**3

Piece = tuple[str, "Block"]
"""Megatron parameter and the block of it that is part of a Hugging Face tensor."""


def export_folder(
    target: Path,
    source: Path,
    shape: ModelShape,
    groups: Groups,
    layout: ParallelConfig,
    parameters: Mapping[str, torch.Tensor],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `target`; every rank calls it. parameters: this rank's, by Megatron name.

    Waits for: every rank, twice. Unblocked by: them, or the groups' deadline.
    """
    shapes = hf_shapes(shape)
    element_bytes = next(iter(parameters.values())).element_size()
    stages = _names_by_stage(shape, layout)
    plan = plan_files(stages, shapes, element_bytes=element_bytes, max_file_bytes=max_file_bytes)
    if dist.get_rank() == 0:
        begin_export(target, source)
    dist.barrier()
    stage = groups.collection.tp_dp_cp
    pieces = _pieces_by_rank(shape, layout, dist.get_process_group_ranks(stage))
    for file in plan:
        if file.stage != groups.position.place.pipeline_rank:
            continue
        tensors = {
            name: _assemble(name, shapes[name], pieces, stage, parameters) for name in file.tensors
        }
        if stage.rank() == 0:
            write_weights(building_folder(target) / file.name, tensors)
    dist.barrier()
    if dist.get_rank() == 0:
        finish_export(target, plan, shapes, element_bytes=element_bytes)


def write_weights(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One weight file beside config.json, readable by whoever may read that."""
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors leaves it to the owner alone.
    shutil.copymode(path.with_name("config.json"), path)


def _names_by_stage(shape: ModelShape, layout: ParallelConfig) -> list[list[str]]:
    """Tensors each stage writes; one that two stages hold goes to the first of them."""
    stages: list[list[str]] = []
    seen: set[str] = set()
    for pipeline_rank in range(layout.pipeline):
        place = Place(
            pipeline_rank=pipeline_rank, pipeline_size=layout.pipeline, virtual_size=layout.virtual
        )
        shards = megatron_layout(shape, place)
        names = dict.fromkeys(block.hf_name for shard in shards for block in shard.blocks)
        stages.append([name for name in names if name not in seen])
        seen.update(names)
    return stages


def _pieces_by_rank(
    shape: ModelShape, layout: ParallelConfig, ranks: list[int]
) -> dict[int, dict[str, list[Piece]]]:
    """By rank of a stage, then Hugging Face name: what it sends; replicas only once."""
    seen = set()
    by_rank: dict[int, dict[str, list[Piece]]] = {}
    for rank in ranks:
        pieces = by_rank.setdefault(rank, {})
        place = Position.of(rank, layout).place
        for shard in megatron_layout(shape, place, fused=device.has_transformer_engine()):
            for block in shard.blocks:
                if (block.hf_name, block.hf_rect) not in seen:
                    seen.add((block.hf_name, block.hf_rect))
                    pieces.setdefault(block.hf_name, []).append((shard.name, block))
    return by_rank


def _assemble(
    name: str,
    full: tuple[int, ...],
    pieces: dict[int, dict[str, list[Piece]]],
    group: dist.ProcessGroup,
    parameters: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The whole tensor on the first rank of the stage; an empty one on the others, which send."""
    mine, writer = dist.get_rank(), next(iter(pieces))
    sample = next(iter(parameters.values()))

    def local(piece: Piece) -> torch.Tensor:
        return parameters[piece[0]].detach()[piece[1].local_rect.slices].contiguous()

    if mine != writer:
        for piece in pieces[mine].get(name, ()):
            dist.send(local(piece), writer, group=group)
        return sample.new_empty(0)
    whole = torch.empty(full, dtype=sample.dtype)
    for rank, by_name in pieces.items():
        for piece in by_name.get(name, ()):
            block = piece[1]
            if rank == mine:
                value = local(piece)
            else:
                value = sample.new_empty(block.hf_rect.shape)
                dist.recv(value, rank, group=group)
            whole[block.hf_rect.slices] = value.cpu()
    return whole

"""Writes the trained weights as a Hugging Face folder, without one place holding all of them.

Data rank 0 of each pipeline stage takes part. Tensor by tensor, the ranks of the tensor group
send their rectangles to tensor rank 0, which writes a file whenever its share of the file
plan is full. Global rank 0 copies configuration and tokenizer before, and writes the index
and renames the folder after.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mega_agentrl.reshard.checkpoint import (
    begin_export,
    building_folder,
    finish_export,
    plan_files,
)
from mega_agentrl.reshard.names import hf_shapes, megatron_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.actor.groups import Groups
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
    parameters: Mapping[str, torch.Tensor],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `target`; every rank calls it. parameters: this rank's, by Megatron name.

    Waits for: every rank, twice. Unblocked by: them, or the groups' deadline.
    """
    position = groups.position
    shapes = hf_shapes(shape)
    element_bytes = next(iter(parameters.values())).element_size()
    stages = _names_by_stage(shape, position.tensor_size, position.pipeline_size)
    plan = plan_files(stages, shapes, element_bytes=element_bytes, max_file_bytes=max_file_bytes)
    if dist.get_rank() == 0:
        begin_export(target, source)
    dist.barrier()
    if position.data_rank == 0:
        pieces = _pieces_by_rank(shape, groups)
        for file in plan:
            if file.stage != position.pipeline_rank:
                continue
            tensors = {
                name: _assemble(name, shapes[name], pieces, groups, parameters)
                for name in file.tensors
            }
            if position.tensor_rank == 0:
                path = building_folder(target) / file.name
                save_file(tensors, path, metadata={"format": "pt"})
    dist.barrier()
    if dist.get_rank() == 0:
        finish_export(target, plan, shapes, element_bytes=element_bytes)


def _names_by_stage(shape: ModelShape, tensor_size: int, pipeline_size: int) -> list[list[str]]:
    """Tensors each stage writes; one that two stages hold goes to the first of them."""
    stages: list[list[str]] = []
    seen: set[str] = set()
    for stage in range(pipeline_size):
        shards = megatron_layout(
            shape,
            tensor_rank=0,
            tensor_size=tensor_size,
            pipeline_rank=stage,
            pipeline_size=pipeline_size,
        )
        names = dict.fromkeys(block.hf_name for shard in shards for block in shard.blocks)
        stages.append([name for name in names if name not in seen])
        seen.update(names)
    return stages


def _pieces_by_rank(shape: ModelShape, groups: Groups) -> list[dict[str, list[Piece]]]:
    """By tensor rank, then Hugging Face name: what that rank sends; replicas only once."""
    position = groups.position
    seen = set()
    ranks: list[dict[str, list[Piece]]] = []
    for tensor_rank in range(position.tensor_size):
        pieces: dict[str, list[Piece]] = {}
        for shard in megatron_layout(
            shape,
            tensor_rank=tensor_rank,
            tensor_size=position.tensor_size,
            pipeline_rank=position.pipeline_rank,
            pipeline_size=position.pipeline_size,
        ):
            for block in shard.blocks:
                if (block.hf_name, block.hf_rect) not in seen:
                    seen.add((block.hf_name, block.hf_rect))
                    pieces.setdefault(block.hf_name, []).append((shard.name, block))
        ranks.append(pieces)
    return ranks


def _assemble(
    name: str,
    full: tuple[int, ...],
    pieces: list[dict[str, list[Piece]]],
    groups: Groups,
    parameters: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The whole tensor on tensor rank 0; an empty one on the others, which send."""
    group = groups.collection.tp
    ranks = dist.get_process_group_ranks(group)
    mine = groups.position.tensor_rank
    sample = next(iter(parameters.values()))

    def local(piece: Piece) -> torch.Tensor:
        return parameters[piece[0]].detach()[piece[1].local_rect.slices].contiguous()

    if mine:
        for piece in pieces[mine].get(name, ()):
            dist.send(local(piece), ranks[0], group=group)
        return sample.new_empty(0)
    whole = torch.empty(full, dtype=sample.dtype)
    for tensor_rank, by_name in enumerate(pieces):
        for piece in by_name.get(name, ()):
            block = piece[1]
            if tensor_rank == mine:
                value = local(piece)
            else:
                value = sample.new_empty(block.hf_rect.shape)
                dist.recv(value, ranks[tensor_rank], group=group)
            whole[block.hf_rect.slices] = value.cpu()
    return whole

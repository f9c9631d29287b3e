"""Weights as a Hugging Face folder: from the ranks of a model, or from a training checkpoint.

No process ever holds all weights. Tensor by tensor, the ranks of a pipeline stage send their blocks
to the first rank of the stage, which writes the weight files of the stage; of several ranks with
the same block, the first sends it. They send in rounds (`plan_rounds`), over the one communicator
of the stage: NCCL would create another one for every pair of ranks that communicates alone. Global
rank 0 first copies configuration and tokenizer, and at the end writes the index and renames the
folder. A checkpoint is converted by a single process, file by file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mega_agentrl.actor import device
from mega_agentrl.actor.checkpoint.checkpoint_dir import CheckpointManifest, find_damage
from mega_agentrl.actor.checkpoint.sharded_state import (
    MASTER,
    WEIGHT,
    has_master_weights,
    state_key,
)
from mega_agentrl.actor.checkpoint.torch_dist_reader import read_tensors
from mega_agentrl.actor.parallel.process_groups import RankCoordinates
from mega_agentrl.reshard.adapters import merge_adapters
from mega_agentrl.reshard.hf_checkpoint import (
    begin_export,
    finish_export,
    partial_export_folder,
    plan_files,
    read_shards,
)
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.lora_layout import adapted_module, lora_shapes
from mega_agentrl.reshard.mapping.model_mapping import (
    hf_shapes,
    is_hf_vision_name,
    megatron_layout,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.actor.megatron_model import MegatronModel
    from mega_agentrl.config.sections.policy import ParallelConfig

MAX_FILE_BYTES = 2 * 1024**3
MAX_ROUND_BYTES = 256 * 1024**2

ParameterBlock = tuple[str, "Block"]
"""Name of a Megatron parameter, and a block of it that is part of a Hugging Face tensor."""


def export_hf_folder(target: Path, model: MegatronModel) -> None:
    """Write the weights of all ranks as a Hugging Face folder; every rank calls this.

    Configuration and tokenizer are copied from the folder that the model was loaded from. Waits
    for all ranks twice, at most for the timeout of the groups.
    """
    shape, parallel = model.shape, model.config.parallel
    shapes = hf_shapes(shape)
    element_bytes = model.dtype.itemsize
    stages = _hf_names_by_stage(shape, parallel)
    plan = plan_files(stages, shapes, element_bytes=element_bytes, max_file_bytes=MAX_FILE_BYTES)
    if dist.get_rank() == 0:
        begin_export(target, model.hf_source_folder)
    model.groups.barrier("begin of export")
    stage_group = model.groups.pg_collection.tp_dp_cp
    blocks_by_rank = _blocks_by_rank(shape, parallel, dist.get_process_group_ranks(stage_group))
    for file in plan:
        if file.stage != model.groups.coordinates.model_parallel_rank.pipeline_rank:
            continue
        tensors = {
            name: _gather_tensor(name, shapes[name], blocks_by_rank, stage_group, model)
            for name in file.tensors
        }
        if stage_group.rank() == 0:
            _write_safetensors(partial_export_folder(target) / file.name, tensors)
    model.groups.barrier("end of export")
    if dist.get_rank() == 0:
        finish_export(target, plan, shapes, element_bytes=element_bytes)


def convert_checkpoint_to_hf(
    checkpoint: Path,
    model: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, in a single process.

    Adapters are merged into the weights of `model`.

    The stored tensors have Hugging Face's names and shapes (`checkpoint.sharded_state`), so they
    are read and written file by file: at most one weight file is in memory at a time.

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
    manifest.require_shape(checkpoint, shape, str(model))
    damage = find_damage(checkpoint, manifest, manifest.files, contents=True)
    if damage:
        raise damage
    train_dtype = getattr(torch, manifest.dtype)
    dtype = dtype or train_dtype
    exports_masters = has_master_weights(train_dtype) and dtype == torch.float32
    shapes = hf_shapes(shape)

    def stored_key(name: str) -> str:
        has_master = not (manifest.freeze_vision and is_hf_vision_name(shape, name))
        return state_key(MASTER if exports_masters and has_master else WEIGHT, name)

    plan = plan_files(
        [list(shapes)], shapes, element_bytes=dtype.itemsize, max_file_bytes=max_file_bytes
    )
    begin_export(target, model)
    for file in plan:
        if manifest.lora is None:
            stored = {name: shapes[name] for name in file.tensors}
        else:
            own = {name: shapes[name] for name in file.tensors}
            stored = lora_shapes(own, manifest.lora["rank"], manifest.lora["targets"])
        state = {stored_key(name): torch.empty(stored[name], dtype=dtype) for name in stored}
        if state:
            read_tensors(state, checkpoint)
        tensors = {name: state[stored_key(name)] for name in stored}
        if manifest.lora is not None:
            tensors = _merge_adapters(model, shape, file.tensors, tensors, manifest.lora, dtype)
        _write_safetensors(partial_export_folder(target) / file.name, tensors)
    finish_export(target, plan, shapes, element_bytes=dtype.itemsize)


def _merge_adapters(
    folder: Path,
    shape: ModelShape,
    names: Sequence[str],
    adapters: Mapping[str, torch.Tensor],
    lora: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return tensors of a Hugging Face folder, with the changes of their adapters."""
    shapes = hf_shapes(shape)
    merged = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
    wholes = {name: Rect.whole(shapes[name]) for name in names}
    layout = [
        ShardLayout(name, shapes[name], (Block(name, whole, whole),))
        for name, whole in wholes.items()
    ]
    read_shards(folder, layout, shapes, merged)
    scale = lora["alpha"] / lora["rank"]
    for shard in layout:
        if (module := adapted_module(shard.name, lora["targets"])) is not None:
            left, right = (adapters[f"{module}.lora_{factor}.weight"] for factor in "BA")
            merged[shard.name] = merge_adapters(
                merged[shard.name], shard, {module: (left, right)}, scale
            )
    return merged


def _write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a weight file with the same permissions as the config.json beside it."""
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes the file readable by its owner only.
    shutil.copymode(path.with_name("config.json"), path)


def _hf_names_by_stage(shape: ModelShape, parallel: ParallelConfig) -> list[list[str]]:
    """List the tensors that each stage writes: those that no earlier stage has."""
    stages: list[list[str]] = []
    assigned: set[str] = set()
    for pipeline_rank in range(parallel.pipeline):
        mp_rank = ModelParallelRank(
            pipeline_rank=pipeline_rank,
            pipeline_size=parallel.pipeline,
            virtual_size=parallel.virtual_pipeline,
        )
        shards = megatron_layout(shape, mp_rank)
        names = dict.fromkeys(block.hf_name for shard in shards for block in shard.blocks)
        stages.append([name for name in names if name not in assigned])
        assigned.update(names)
    return stages


def _blocks_by_rank(
    shape: ModelShape, parallel: ParallelConfig, ranks: list[int]
) -> dict[int, dict[str, list[ParameterBlock]]]:
    """Map each rank of a stage to the blocks that it sends, by Hugging Face name."""
    assigned = set()
    blocks_of_rank: dict[int, dict[str, list[ParameterBlock]]] = {}
    for rank in ranks:
        blocks_by_name = blocks_of_rank.setdefault(rank, {})
        mp_rank = RankCoordinates.from_rank(rank, parallel).model_parallel_rank
        for shard in megatron_layout(shape, mp_rank, fused=device.has_transformer_engine()):
            for block in shard.blocks:
                if (block.hf_name, block.hf_rect) not in assigned:
                    assigned.add((block.hf_name, block.hf_rect))
                    blocks_by_name.setdefault(block.hf_name, []).append((shard.name, block))
    return blocks_of_rank


def plan_rounds(
    blocks_by_rank: Mapping[int, Sequence[ParameterBlock]],
    *,
    element_bytes: int,
    max_bytes: int = MAX_ROUND_BYTES,
) -> list[dict[int, ParameterBlock]]:
    """Divide the blocks of a tensor into rounds, each with at most one block from every rank.

    A round has at most `max_bytes`, or a single block. Two blocks of a rank in one round could be
    received as each other.
    """
    rounds: list[dict[int, ParameterBlock]] = []
    num_blocks = max((len(blocks) for blocks in blocks_by_rank.values()), default=0)
    for index in range(num_blocks):
        free_bytes = -1
        for rank, blocks in blocks_by_rank.items():
            if index >= len(blocks):
                continue
            num_bytes = blocks[index][1].hf_rect.numel * element_bytes
            if num_bytes > free_bytes:
                rounds.append({})
                free_bytes = max(max_bytes, num_bytes)
            rounds[-1][rank] = blocks[index]
            free_bytes -= num_bytes
    return rounds


def _gather_tensor(
    name: str,
    full_shape: tuple[int, ...],
    blocks_by_rank: dict[int, dict[str, list[ParameterBlock]]],
    group: dist.ProcessGroup,
    model: MegatronModel,
) -> torch.Tensor:
    """Return the full tensor on the first rank of the stage, on others an empty tensor."""
    own_rank, writer_rank = dist.get_rank(), next(iter(blocks_by_rank))
    full = torch.empty(full_shape if own_rank == writer_rank else 0, dtype=model.dtype)
    rounds = plan_rounds(
        {rank: by_name.get(name, ()) for rank, by_name in blocks_by_rank.items()},
        element_bytes=model.dtype.itemsize,
    )
    for blocks in rounds:
        values = _exchange_round(blocks, writer_rank, group, model)
        for rank, value in values.items():
            full[blocks[rank][1].hf_rect.slices] = value.cpu()
    return full


def _exchange_round(
    blocks: Mapping[int, ParameterBlock],
    writer_rank: int,
    group: dist.ProcessGroup,
    model: MegatronModel,
) -> dict[int, torch.Tensor]:
    """Send this rank's block to the writer; return the values of all blocks by rank, there only."""
    own_rank, values = dist.get_rank(), {}
    if own_rank in blocks:
        parameter, block = blocks[own_rank]
        local = model.merged_weight(parameter)[block.local_rect.slices]
        values[own_rank] = local.contiguous()
    if own_rank == writer_rank:
        options = {"dtype": model.dtype, "device": device.current_device()}
        received = {
            rank: torch.empty(block.hf_rect.shape, **options)
            for rank, (_, block) in blocks.items()
            if rank != writer_rank
        }
        values |= received
        transfers = [dist.P2POp(dist.irecv, value, rank, group) for rank, value in received.items()]
    else:
        transfers = [dist.P2POp(dist.isend, value, writer_rank, group) for value in values.values()]
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return values if own_rank == writer_rank else {}

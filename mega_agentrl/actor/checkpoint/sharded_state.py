"""The state of a model in a checkpoint, as Megatron's sharded tensors.

    weight.NAME                  in the training dtype
    master.NAME                  float32, where training is in bf16; not of a frozen vision tower
    exp_avg.NAME, exp_avg_sq.NAME   Adam's moments, float32; not of a frozen vision tower
    rng                          torch's random state, one per rank

With adapters these are the tensors of the adapters alone (`reshard.mapping.lora_layout`).

NAME and the global shape are those of the Hugging Face tensor; the global offset is the position of
a rank's part in it (`iter_hf_views`). Hence any parallel layout can load the checkpoint of any
other, with and without the distributed optimizer. Vocabulary padding is not stored.

One replica writes a parameter: that with the least to write so far, so that replicas share the
work. All ranks read.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mega_agentrl.actor import device
from mega_agentrl.actor.training.optimizer import MOMENTS
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.lora_layout import is_lora_param
from mega_agentrl.reshard.mapping.model_mapping import (
    MEGATRON_OUTPUT_LAYER,
    hf_embedding,
    is_expert_param,
    is_hf_vision_name,
    is_tensor_replicated,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

    from mega_agentrl.actor.megatron_model import MegatronModel
    from mega_agentrl.actor.training.offload import HostBlocks
    from mega_agentrl.reshard.layout import ShardLayout

WEIGHT, MASTER, RNG = "weight", "master", "rng"


def state_key(kind: str, hf_name: str) -> str:
    """Return the key of a stored tensor."""
    return f"{kind}.{hf_name}"


def has_master_weights(dtype: torch.dtype) -> bool:
    """Return whether training in a dtype keeps float32 master weights."""
    return dtype != torch.float32


def copy_state_to_host(model: MegatronModel, host_blocks: HostBlocks) -> dict[str, Any]:
    """Copy the state that this rank writes to host memory; return views of the copy.

    Args:
        model: The model to save.
        host_blocks: Memory of the copy, which is used from its beginning and grows as needed.
    """
    written = {is_sharded: _written_parameters(model, is_sharded) for is_sharded in (False, True)}
    is_distributed = model.config.parallel.distributed_optimizer
    ranges = [
        (kind, shard, first, values)
        for kind, shard, first, values in _iter_flat_ranges(model)
        if shard.name in written[kind != WEIGHT and is_distributed]
    ]
    # Wide elements first, so that all of them lie at multiples of their size.
    ranges.sort(key=lambda flat_range: -flat_range[-1].element_size())
    host_blocks.reserve(sum(values.nbytes for *_, values in ranges))
    chunk_pairs = host_blocks.iter_chunk_pairs(values.view(torch.uint8) for *_, values in ranges)
    state: dict[str, Any] = {}
    shapes = model.state_shapes
    for kind, shard, first, values in ranges:
        start, stop = first, first + values.numel()
        while start < stop:
            device_chunk, host_chunk = next(chunk_pairs)
            host_chunk.copy_(device_chunk, non_blocking=True)
            copied_values = host_chunk.view(values.dtype)
            for hf_name, rect, view in iter_hf_views(shard, copied_values, start):
                state[str(len(state))] = _make_sharded_tensor(
                    kind, hf_name, shapes[hf_name], rect.start, view
                )
            start += copied_values.numel()
    if device.has_cuda():
        torch.cuda.synchronize()
    num_ranks = torch.distributed.get_world_size()
    state[RNG] = ShardedObject(RNG, _rng_state(), (num_ranks,), (torch.distributed.get_rank(),))
    return state


def sharded_state_to_load(
    model: MegatronModel, *, masters: bool, num_ranks: int, freeze_vision: bool = False
) -> dict[str, Any]:
    """Return the views of the model's own memory that this rank reads into.

    Elements that are in no stored tensor (padding) are set to 0.

    Args:
        model: The model to load into.
        masters: Whether the checkpoint holds float32 master weights.
        num_ranks: Number of ranks that wrote the checkpoint.
        freeze_vision: Whether the checkpoint is of a run with a frozen vision tower, which has no
            master weights.
    """
    state: dict[str, Any] = {}
    shapes = model.state_shapes
    for kind, shard, first, values in _iter_flat_ranges(model):
        if sum(block.local_rect.numel for block in shard.blocks) < prod(shard.shape):
            values.zero_()
        takes_masters = masters and values.dtype == torch.float32
        for hf_name, rect, view in iter_hf_views(shard, values, first):
            stored_kind = kind
            if kind in (WEIGHT, MASTER):
                has_master = not (freeze_vision and is_hf_vision_name(model.shape, hf_name))
                stored_kind = MASTER if takes_masters and has_master else WEIGHT
            state[str(len(state))] = _make_sharded_tensor(
                stored_kind, hf_name, shapes[hf_name], rect.start, view
            )
    rank = torch.distributed.get_rank() % num_ranks
    state[RNG] = ShardedObject(RNG, None, (num_ranks,), (rank,))
    return state


def stored_shapes(model: MegatronModel) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor in the model's checkpoints, by key."""
    kinds = [*MOMENTS, *([MASTER] if has_master_weights(model.dtype) else [])]
    shapes = model.state_shapes
    stored = {state_key(WEIGHT, name): full_shape for name, full_shape in shapes.items()}
    return stored | {
        state_key(kind, name): full_shape
        for kind in kinds
        for name, full_shape in shapes.items()
        if not (model.config.model.freeze_vision and is_hf_vision_name(model.shape, name))
    }


def restore_rng_state(loaded: Any) -> None:
    """Restore torch's random state, as `_rng_state` has it.

    Raises:
        ValueError: It is something else.
    """
    for kind, own in _rng_state().items():
        state = loaded.get(kind) if isinstance(loaded, dict) else None
        if state is None and kind == "cuda":  # the checkpoint of a run on CPUs
            continue
        is_tensor = isinstance(state, torch.Tensor)
        if not is_tensor or (state.dtype, state.shape) != (own.dtype, own.shape):
            got = (state.dtype, tuple(state.shape)) if is_tensor else type(state).__name__
            raise InputError(f"random state of {kind}", got, f"{own.dtype}, {tuple(own.shape)}")
        if kind == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def rects_of_flat_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rect]:
    """Yield the rectangles of a tensor that hold its flat elements [start, stop), in order."""
    if len(shape) == 1:
        if start < stop:
            yield Rect((start,), (stop,))
        return
    row_numel = prod(shape[1:])
    while start < stop:
        row, first = divmod(start, row_numel)
        if first or stop - start < row_numel:
            last = min(row_numel, first + stop - start)
            for rect in rects_of_flat_range(shape[1:], first, last):
                yield Rect((row, *rect.start), (row + 1, *rect.stop))
            start += last - first
        else:
            end = stop // row_numel
            yield Rect((row, *(0,) * (len(shape) - 1)), (end, *shape[1:]))
            start = end * row_numel


def iter_hf_views(
    shard: ShardLayout, values: torch.Tensor, start: int = 0
) -> Iterator[tuple[str, Rect, torch.Tensor]]:
    """Yield (Hugging Face name, rectangle in that tensor, view) for all elements except padding.

    A flat range is at most three rectangles of a matrix (the rest of a row, whole rows, the
    beginning of a row), a few more of a tensor with more dims, and each of them intersects the
    blocks of the parameter in rectangles.

    Args:
        shard: Layout of the parameter.
        values: `[n]` elements start .. start + n - 1 of the flat parameter.
        start: First element of `values`.
    """
    offset = 0
    for rect in rects_of_flat_range(shard.shape, start, start + values.numel()):
        rect_values = values[offset : offset + rect.numel].view(rect.shape)
        offset += rect.numel
        for block in shard.blocks:
            overlap = rect.intersect(block.local_rect)
            if overlap is not None:
                overlap_in_rect = overlap.translate(rect.start, (0,) * len(rect.start))
                hf_rect = overlap.translate(block.local_rect.start, block.hf_rect.start)
                yield block.hf_name, hf_rect, rect_values[overlap_in_rect.slices]


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _iter_flat_ranges(
    model: MegatronModel,
) -> Iterator[tuple[str, ShardLayout, int, torch.Tensor]]:
    """Yield (kind, layout, first element, flat values) of this rank."""
    # Before the weights, because this raises an error if a part of the state is in host memory.
    shards = list(model.optimizer.state_shards()) if model.is_trainable else []
    layouts = {}
    for shard in model.state_layouts:
        parameter = model.parameters[shard.name]
        layouts[id(parameter)] = shard
        yield WEIGHT, shard, 0, parameter.detach().view(-1)
    for parameter, first, values in shards:
        shard = layouts[id(parameter)]
        if has_master_weights(parameter.dtype):
            yield MASTER, shard, first, values["param"]
        for kind in MOMENTS:
            yield kind, shard, first, values[kind]


def _written_parameters(model: MegatronModel, is_sharded: bool) -> set[str]:
    """Return the names of the parameters that this rank writes.

    Replicas have the same parameters, and compute the same shares.

    Args:
        model: The model.
        is_sharded: Whether data ranks hold shards of the values instead of replicas.
    """
    collection = model.groups.pg_collection
    loads: dict[tuple[bool, int], list[int]] = {}
    written = set()
    for shard in model.state_layouts:
        if shard.name.endswith(MEGATRON_OUTPUT_LAYER) and any(
            b.hf_name == hf_embedding(model.shape) for b in shard.blocks
        ):
            continue  # a second copy of the tied embedding
        is_expert = is_expert_param(shard.name)
        replica_groups: list[dist.ProcessGroup] = []
        if not is_sharded:
            replica_groups.append(collection.expt_dp if is_expert else collection.dp_cp)
        if is_tensor_replicated(model.shape, shard.name) and (
            not is_expert or is_lora_param(shard.name)
        ):
            replica_groups.append(collection.expt_tp if is_expert else collection.tp)
        replica, num_replicas = 0, 1
        for group in replica_groups:
            replica = replica * group.size() + group.rank()
            num_replicas *= group.size()
        load = loads.setdefault((is_expert, num_replicas), [0] * num_replicas)
        writer = load.index(min(load))
        load[writer] += prod(shard.shape)
        if writer == replica:
            written.add(shard.name)
    return written


def _make_sharded_tensor(
    kind: str,
    hf_name: str,
    full_shape: tuple[int, ...],
    offset: tuple[int, ...],
    view: torch.Tensor,
) -> ShardedTensor:
    return ShardedTensor(
        key=state_key(kind, hf_name),
        data=view,
        dtype=view.dtype,
        local_shape=tuple(view.shape),
        global_shape=full_shape,
        global_offset=offset,
        axis_fragmentations=None,
    )

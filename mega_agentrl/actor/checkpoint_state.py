"""What of a network goes into a checkpoint, as Megatron's sharded tensors.

    weight.NAME                  in the training dtype
    master.NAME                  float32, where training is in bf16
    exp_avg.NAME, exp_avg_sq.NAME   Adam's moments, float32
    rng                          torch's random state, by rank

NAME and the global shape are those of the Hugging Face tensor, the global offset is where a
rank's piece lies in it (`flat_shards`). Hence any layout reads what any other wrote: tensor,
pipeline, virtual, expert and data ranks, with and without the distributed optimizer, whose
ranks write and read just their own elements without gathering. Padding of the vocabulary is
not stored.

Of replicas one writes; which one goes around with the number of the parameter, so that they
share the work. Everybody reads.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mega_agentrl.actor import device
from mega_agentrl.actor.flat_shards import hf_views
from mega_agentrl.reshard.names import (
    EMBEDDING,
    OUTPUT_LAYER,
    hf_shapes,
    is_expert,
    is_replicated,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist

    from mega_agentrl.actor.network import Network
    from mega_agentrl.reshard.layout import ShardLayout

WEIGHT, MASTER, RNG = "weight", "master", "rng"
MOMENTS = ("exp_avg", "exp_avg_sq")


def key(kind: str, hf_name: str) -> str:
    """Key of a stored tensor."""
    return f"{kind}.{hf_name}"


def has_masters(dtype: torch.dtype) -> bool:
    """Whether training in a dtype keeps float32 copies of the weights."""
    return dtype != torch.float32


def to_save(network: Network, *, copy: bool) -> dict[str, Any]:
    """What this rank writes. copy: into host memory, so that training can go on meanwhile."""
    state: dict[str, Any] = {}
    shapes = hf_shapes(network.shape)
    for kind, number, shard, first, run in _runs(network):
        own_share = kind != WEIGHT and network.config.parallel.distributed_optimizer
        if not _writes(network, number, shard, own_share=own_share):
            continue
        run = run.to("cpu", copy=True) if copy else run
        for hf_name, rect, view in hf_views(shard, run, first):
            state[str(len(state))] = _entry(kind, hf_name, shapes[hf_name], rect.start, view)
    ranks = torch.distributed.get_world_size()
    state[RNG] = ShardedObject(RNG, _rng(), (ranks,), (torch.distributed.get_rank(),))
    return state


def to_load(network: Network, *, masters: bool, num_ranks: int) -> dict[str, Any]:
    """Where this rank reads into: views of the network's own memory.

    masters: whether there are float32 masters in the checkpoint; num_ranks: how many ranks
    wrote it. Elements that no tensor has (padding) are set to 0 here.
    """
    state: dict[str, Any] = {}
    shapes = hf_shapes(network.shape)
    for kind, _, shard, first, run in _runs(network):
        if sum(block.local_rect.numel for block in shard.blocks) < prod(shard.shape):
            run.zero_()
        source = kind
        if kind in (WEIGHT, MASTER):
            source = MASTER if masters and run.dtype == torch.float32 else WEIGHT
        for hf_name, rect, view in hf_views(shard, run, first):
            state[str(len(state))] = _entry(source, hf_name, shapes[hf_name], rect.start, view)
    rank = torch.distributed.get_rank() % num_ranks
    state[RNG] = ShardedObject(RNG, None, (num_ranks,), (rank,))
    return state


def stored_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Full shape of every tensor in the network's checkpoints, by key."""
    kinds = [WEIGHT, *MOMENTS, *([MASTER] if has_masters(network.dtype) else [])]
    shapes = hf_shapes(network.shape)
    return {key(kind, name): full for kind in kinds for name, full in shapes.items()}


def take_rng(loaded: dict[str, torch.Tensor]) -> None:
    """Put back torch's random state."""
    torch.set_rng_state(loaded["cpu"])
    if device.has_cuda() and "cuda" in loaded:
        torch.cuda.set_rng_state(loaded["cuda"])


def _rng() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _runs(network: Network) -> Iterator[tuple[str, int, ShardLayout, int, torch.Tensor]]:
    """(kind, number of the parameter, its layout, first element, flat values) on this rank."""
    # First, because it checks that nothing is away in host memory.
    shares = list(network.optimizer.shares()) if network.trains else []
    numbers = {}
    for number, shard in enumerate(network.layout):
        parameter = network.parameters[shard.name]
        numbers[id(parameter)] = number
        yield WEIGHT, number, shard, 0, parameter.detach().view(-1)
    for parameter, first, values in shares:
        number = numbers[id(parameter)]
        shard = network.layout[number]
        if has_masters(parameter.dtype):
            yield MASTER, number, shard, first, values["param"]
        for kind in MOMENTS:
            yield kind, number, shard, first, values[kind]


def _writes(network: Network, number: int, shard: ShardLayout, *, own_share: bool) -> bool:
    """Whether this rank is the replica that writes. own_share: data ranks hold no replicas."""
    if shard.name.endswith(OUTPUT_LAYER) and any(b.hf_name == EMBEDDING for b in shard.blocks):
        return False  # the tied embedding's second copy
    collection, expert = network.groups.collection, is_expert(shard.name)
    replicas: list[dist.ProcessGroup] = []
    if not own_share:
        replicas.append(collection.expt_dp if expert else collection.dp_cp)
    if not expert and is_replicated(network.shape, shard.name):
        replicas.append(collection.tp)
    index, size = 0, 1
    for group in replicas:
        index, size = index * group.size() + group.rank(), size * group.size()
    return number % size == index


def _entry(
    kind: str, hf_name: str, full: tuple[int, ...], offset: tuple[int, ...], view: torch.Tensor
) -> ShardedTensor:
    return ShardedTensor(
        key=key(kind, hf_name),
        data=view,
        dtype=view.dtype,
        local_shape=tuple(view.shape),
        global_shape=full,
        global_offset=offset,
        axis_fragmentations=None,
    )

"""The process groups of one rank, created once and passed explicitly.

Ranks are numbered tensor first, then context, data and pipeline: for tensor rank t, context
rank c, data rank d and pipeline rank p, rank = t + T * (c + C * (d + D * p)), so that the ranks
of a tensor-parallel group are consecutive (on one node). Experts split the same T * C * D ranks
of a stage differently: expert tensor first, then expert, then expert data. The ranks of a group
have in common:

    tensor   c, d, p         pipeline  t, c, d        data             t, c, p
    context  t, d, p         model     c, d           data x context   t, p
    embedding                first and last stage of a pipeline (tied embedding)
    expert, expert tensor, expert data, and their products over the stage
    all      the default group
    alone    this rank only: a partition into single ranks, or a field that is not used

Megatron's global `parallel_state` is not used. An unset field of `ProcessGroupCollection` is
None, which torch would take for the default group, so every field in use is set and checked.

A rank creates its own groups only. NCCL creates a communicator in the first collective of a group,
which at the first checkpoint would find the GPU full: all are created right after the groups. A
barrier goes over the job's store and needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mega_agentrl.actor import device
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.session import wait_for_all
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.sections.policy import ParallelConfig

_SHARED_COORDINATES: dict[str, tuple[str, ...]] = {
    "tp": ("context", "data", "pipeline"),
    "dp_cp": ("tensor", "pipeline"),
    "expt_dp": ("expert_tensor", "expert", "pipeline"),
    "pp": ("tensor", "context", "data"),
    "dp": ("tensor", "context", "pipeline"),
    "mp": ("context", "data"),
    "cp": ("tensor", "data", "pipeline"),
    "tp_cp": ("data", "pipeline"),
    "tp_dp_cp": ("pipeline",),
    "ep": ("expert_tensor", "expert_data", "pipeline"),
    "expt_tp": ("expert", "expert_data", "pipeline"),
    "tp_ep": ("expert_data", "pipeline"),
    "tp_ep_pp": ("expert_data",),
}
"""Coordinates that the ranks of a group have in common, by Megatron's name of the group."""

_GROUP_FIELDS = {
    "tensor": "tp",
    "context": "cp",
    "expert": "tp_ep",
    "pipeline": "pp",
    "data": "dp_cp",
    "all": "intra_dist_opt",
}
"""Field of `ProcessGroupCollection` by the name of the group in messages; "data" is the group that
sums gradients."""

_FIELDS_WITH_COLLECTIVES = (
    *("intra_dist_opt", "tp", "cp", "pp", "dp_cp", "tp_dp_cp", "ep", "expt_tp", "tp_ep"),
    *("expt_dp", "embd"),
)
"""Fields whose groups Megatron or this project use for more than ranks and sizes."""

_MAX_LISTED_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
    """Coordinates of a rank in the parallel layout."""

    model_parallel_rank: ModelParallelRank
    """The coordinates that determine the parameters of the rank; the others count replicas."""
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    expert_data_rank: int

    @classmethod
    def from_rank(cls, rank: int, parallel: ParallelConfig) -> RankCoordinates:
        """Return the coordinates of a global rank.

        Raises:
            ValueError: If the rank is outside the layout, or the expert sizes do not divide the
                ranks of a stage.
        """
        if not 0 <= rank < parallel.world_size:
            raise InputError(
                "rank",
                rank,
                f"0..{parallel.world_size - 1} from "
                f"parallel.tensor={parallel.tensor}, parallel.context={parallel.context}, "
                f"parallel.data={parallel.data}, parallel.pipeline={parallel.pipeline}",
            )
        stage_ranks = parallel.tensor * parallel.context * parallel.data
        num_expert_ranks = parallel.expert * parallel.expert_tensor_size
        if stage_ranks % num_expert_ranks:
            raise ConfigError(
                "parallel.expert",
                parallel.expert,
                f"a value whose product with parallel.expert_tensor={parallel.expert_tensor_size} "
                f"divides {stage_ranks} = parallel.tensor * parallel.context * parallel.data",
                "experts counted as a further factor of the number of ranks",
            )
        rank_in_stage = rank % stage_ranks
        return cls(
            model_parallel_rank=ModelParallelRank(
                tensor_rank=rank % parallel.tensor,
                tensor_size=parallel.tensor,
                pipeline_rank=rank // stage_ranks,
                pipeline_size=parallel.pipeline,
                virtual_size=parallel.virtual_pipeline,
                expert_rank=rank_in_stage // parallel.expert_tensor_size % parallel.expert,
                expert_size=parallel.expert,
                expert_tensor_rank=rank_in_stage % parallel.expert_tensor_size,
                expert_tensor_size=parallel.expert_tensor_size,
            ),
            data_rank=parallel.data_rank(rank),
            data_size=parallel.data,
            context_rank=rank_in_stage // parallel.tensor % parallel.context,
            context_size=parallel.context,
            expert_data_rank=rank_in_stage // num_expert_ranks,
        )

    def along(self, axis: str) -> int:
        """Return the coordinate along an axis, such as `tensor`, `context` or `expert_data`."""
        owner = self if axis in ("data", "context", "expert_data") else self.model_parallel_rank
        return int(getattr(owner, f"{axis}_rank"))

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank belongs to the last pipeline stage, which holds the output layer."""
        return self.model_parallel_rank.pipeline_rank == self.model_parallel_rank.pipeline_size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The process groups in Megatron's form and this rank's coordinates."""

    coordinates: RankCoordinates
    pg_collection: ProcessGroupCollection
    timeout_s: float
    """Timeout of every collective and barrier."""

    def barrier(self, name: str) -> None:
        """Wait for all ranks over the job's store; raises `RuntimeError` at the timeout."""
        wait_for_all(connect_store(f"barriers/{name}"), dist.get_world_size(), self.timeout_s)

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.pg_collection.pp)[-1]

    def describe_peers(self, *kinds: str) -> str:
        """Describe the ranks that an operation over some groups waits for.

        The text is the peer of `types.activity.track_activity`. Groups of this rank alone and
        groups with the same ranks as an earlier one are left out.

        Args:
            *kinds: Keys of `_GROUP_FIELDS`.
        """
        kind_of_ranks: dict[tuple[int, ...], str] = {}
        for kind in kinds:
            ranks = dist.get_process_group_ranks(getattr(self.pg_collection, _GROUP_FIELDS[kind]))
            if len(ranks) > 1:
                kind_of_ranks.setdefault(tuple(ranks), kind)
        return " and ".join(
            f"{kind} {format_ranks(ranks)}" for ranks, kind in kind_of_ranks.items()
        )


def format_ranks(ranks: Sequence[int]) -> str:
    """Format global ranks for messages, abbreviating long lists."""
    if len(ranks) <= _MAX_LISTED_RANKS:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} in all)"


def init_process_groups(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    timeout_s: float,
) -> ParallelGroups:
    """Join `torch.distributed` and create every group; all ranks call this once.

    Waits until all ranks have joined, at most `timeout_s`, which is also the timeout of every
    later collective.

    Raises:
        ValueError: If `world_size` is not that of the layout.
    """
    if world_size != parallel.world_size:
        sizes = "parallel.tensor * parallel.context * parallel.data * parallel.pipeline"
        raise InputError("world_size", world_size, f"{parallel.world_size} = {sizes}")
    coordinates = RankCoordinates.from_rank(rank, parallel)
    with track_activity("creation of the process groups", f"all {format_ranks(range(world_size))}"):
        dist.init_process_group(
            device.distributed_backend(),
            init_method=f"tcp://{master_address}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        pg_collection = build_pg_collection(parallel, rank, timeout_s)
        _create_communicators(pg_collection)
    return ParallelGroups(coordinates=coordinates, pg_collection=pg_collection, timeout_s=timeout_s)


def destroy_process_groups() -> None:
    """Destroy all groups; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def connect_store(name: str) -> dist.Store:
    """Open a new connection to the job's store, with a prefix for this use of the name.

    The prefix contains a counter per rank, which is equal on all ranks because all ranks use a
    name equally often.
    """
    store = dist.distributed_c10d._get_default_store().clone()
    number = store.add(f"{name}/{dist.get_rank()}", 1)
    return dist.PrefixStore(f"{name}/{number}", store)


def partition_ranks(parallel: ParallelConfig, shared: Sequence[str]) -> list[list[int]]:
    """Group the global ranks that have these coordinates in common, such as `tensor` or `expert`.

    The lists are ascending and ordered by their first rank.
    """
    ranks_by_coordinates: dict[tuple[int, ...], list[int]] = {}
    for rank in range(parallel.world_size):
        coordinates = RankCoordinates.from_rank(rank, parallel)
        ranks_by_coordinates.setdefault(
            tuple(coordinates.along(axis) for axis in shared), []
        ).append(rank)
    return list(ranks_by_coordinates.values())


def own_group_ranks(parallel: ParallelConfig, rank: int) -> dict[str, list[int]]:
    """Return the ranks of each group of a rank, by Megatron's name, in the order of creation.

    The group of all ranks is left out, which is the default one.
    """
    ranks_of = {
        name: next(ranks for ranks in partition_ranks(parallel, shared) if rank in ranks)
        for name, shared in _SHARED_COORDINATES.items()
    }
    ends = sorted({ranks_of["pp"][0], ranks_of["pp"][-1]})
    return ranks_of | {"embd": ends if rank in ends else [rank]}


def build_pg_collection(
    parallel: ParallelConfig, rank: int, timeout_s: float
) -> ProcessGroupCollection:
    """Create this rank's groups of an initialised `torch.distributed`; all ranks call this.

    `timeout_s` is the timeout of every collective: a group without its own has the default of its
    backend, not that of `init_process_group`.
    """
    # Members wait for each other only, and the name of a group counts the groups of the rank: all
    # members must have created as many, in the same order. Inner stages lack `embd`, the last one.
    new_group = partial(
        dist.new_group, timeout=timedelta(seconds=timeout_s), use_local_synchronization=True
    )
    world = dist.group.WORLD
    alone = world if parallel.world_size == 1 else new_group([rank])
    groups = {
        name: new_group(ranks) if len(ranks) > 1 else alone
        for name, ranks in own_group_ranks(parallel, rank).items()
    }
    unset = [name for name, group in groups.items() if group is None]
    assert not unset, f"process groups without rank {rank}: {unset}"
    return ProcessGroupCollection(
        **groups,
        intra_dist_opt=world,
        pos_embd=alone,
        intra_dp_cp=groups["dp_cp"],
        intra_expt_dp=groups["expt_dp"],
    )


def _create_communicators(collection: ProcessGroupCollection) -> None:
    """Reduce one element over each group with collectives, in the same order on all ranks."""
    element = torch.zeros(1, device=device.current_device())
    groups = (getattr(collection, name) for name in _FIELDS_WITH_COLLECTIVES)
    for group in dict.fromkeys(groups):
        dist.all_reduce(element, group=group)

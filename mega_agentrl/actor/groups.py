"""The process groups of one rank, built once and passed down.

Ranks are numbered tensor first, then context, data, pipeline: with tensor t, context c, data d
and pipeline p, rank = t + T * (c + C * (d + D * p)), so that a tensor-parallel group is
consecutive (one node). Experts cut the same T * C * D ranks of a stage another way: expert
tensor first, then expert, then expert data. Groups, by what is the same within one:

    tensor   c, d, p         pipeline  t, c, d        data             t, c, p
    context  t, d, p         model     c, d           data x context   t, p
    embedding                first and last stage of a pipeline (tied embedding)
    expert, expert tensor, expert data, and their products over the stage
    alone    this rank; stands where Megatron asks for axes this project does not have

Megatron's `parallel_state` is not used: its collection reads an unset field as None, which
torch takes for the default group, so every field that is used is set and checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from mega_agentrl.actor import device
from mega_agentrl.reshard.place import Place
from mega_agentrl.types.doing import doing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.config.schema import ParallelConfig

_FIELDS = (
    "tp", "pp", "dp", "mp", "embd", "pos_embd", "cp", "tp_cp", "dp_cp", "intra_dp_cp",
    "tp_dp_cp", "ep", "expt_tp", "expt_dp", "intra_expt_dp", "tp_ep", "tp_ep_pp",
    "intra_dist_opt",
)  # fmt: skip


_NAMED = {
    "tensor": "tp",
    "context": "cp",
    "expert": "tp_ep",
    "pipeline": "pp",
    "data": "dp_cp",
    "all": "intra_dist_opt",
}
"""What messages call the groups of the collection; gradients are summed over data x context."""

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands in the layout. place: what it holds; the rest are replicas of it."""

    place: Place
    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    expert_data_rank: int

    @classmethod
    def of(cls, rank: int, layout: ParallelConfig) -> Position:
        """Position of a global rank; raises `ValueError` outside the layout."""
        if not 0 <= rank < layout.num_ranks:
            raise ValueError(
                f"rank={rank}: expected 0..{layout.num_ranks - 1} from "
                f"parallel.tensor={layout.tensor}, parallel.context={layout.context}, "
                f"parallel.data={layout.data}, parallel.pipeline={layout.pipeline}"
            )
        stage_ranks = layout.tensor * layout.context * layout.data
        experts = layout.expert * layout.expert_tensor_size
        if stage_ranks % experts:
            raise ValueError(
                f"parallel.expert={layout.expert} * parallel.expert_tensor="
                f"{layout.expert_tensor_size}: expected a divisor of {stage_ranks} = "
                "parallel.tensor * parallel.context * parallel.data; probable cause: experts "
                "counted as a further factor of the number of ranks"
            )
        inside = rank % stage_ranks
        return cls(
            place=Place(
                tensor_rank=rank % layout.tensor,
                tensor_size=layout.tensor,
                pipeline_rank=rank // stage_ranks,
                pipeline_size=layout.pipeline,
                virtual_size=layout.virtual,
                expert_rank=inside // layout.expert_tensor_size % layout.expert,
                expert_size=layout.expert,
                expert_tensor_rank=inside % layout.expert_tensor_size,
                expert_tensor_size=layout.expert_tensor_size,
            ),
            data_rank=inside // (layout.tensor * layout.context),
            data_size=layout.data,
            context_rank=inside // layout.tensor % layout.context,
            context_size=layout.context,
            expert_data_rank=inside // experts,
        )

    @property
    def last_stage(self) -> bool:
        """Holds the output layer."""
        return self.place.pipeline_rank == self.place.pipeline_size - 1

    @property
    def first_replica(self) -> bool:
        """The one rank of its dense replicas that speaks for them."""
        return self.data_rank == 0 and self.context_rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The collection for Megatron and this rank's position."""

    position: Position
    collection: ProcessGroupCollection

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.collection.pp)[-1]

    def peers(self, *kinds: str) -> str:
        """Whom an operation of groups of these kinds waits for, for `types.doing`.

        kinds: of `_NAMED`. Left out are groups of this rank alone, and those of the same ranks as
        one before.
        """
        found: dict[tuple[int, ...], str] = {}
        for kind in kinds:
            ranks = dist.get_process_group_ranks(getattr(self.collection, _NAMED[kind]))
            if len(ranks) > 1:
                found.setdefault(tuple(ranks), kind)
        return " and ".join(f"{kind} {named_ranks(ranks)}" for ranks, kind in found.items())


def named_ranks(ranks: Sequence[int]) -> str:
    """Global ranks for people; the first and the last of many."""
    if len(ranks) <= _MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} in all)"


def join(
    layout: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    timeout_s: float,
) -> Groups:
    """Join the job and build every group; all ranks call it once.

    Waits for: every rank. Unblocked by: all of them joining, or timeout_s, which is also the
    deadline of every later collective.
    """
    if world_size != layout.num_ranks:
        raise ValueError(
            f"world_size={world_size}: expected {layout.num_ranks} = parallel.tensor * "
            "parallel.context * parallel.data * parallel.pipeline"
        )
    position = Position.of(rank, layout)
    with doing("meeting of the process groups", f"all {named_ranks(range(world_size))}"):
        dist.init_process_group(
            device.backend_name(),
            init_method=f"tcp://{master_address}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return Groups(position=position, collection=build(layout, rank))


def leave() -> None:
    """Give up all groups; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def partition(
    layout: ParallelConfig, key: Callable[[Position], tuple[int, ...]]
) -> list[list[int]]:
    """Global ranks by equal key, each list ascending, lists in order of their first rank."""
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.num_ranks):
        parts.setdefault(key(Position.of(rank, layout)), []).append(rank)
    return list(parts.values())


def build(layout: ParallelConfig, rank: int) -> ProcessGroupCollection:
    """Make the groups over an initialised torch.distributed; all ranks call it alike."""

    def group(key: Callable[[Position], tuple[int, ...]]) -> dist.ProcessGroup:
        return _mine(partition(layout, key), rank)

    alone = _mine([[r] for r in range(layout.num_ranks)], rank)
    pipelines = partition(layout, lambda at: (at.place.tensor_rank, at.context_rank, at.data_rank))
    ends = _mine([sorted({ranks[0], ranks[-1]}) for ranks in pipelines], rank)
    tensor = group(lambda at: (at.context_rank, at.data_rank, at.place.pipeline_rank))
    data_context = group(lambda at: (at.place.tensor_rank, at.place.pipeline_rank))
    expert_data = group(lambda at: (*_expert_place(at), at.place.pipeline_rank))
    everyone = _mine([list(range(layout.num_ranks))], rank)
    collection = ProcessGroupCollection(
        tp=tensor,
        pp=_mine(pipelines, rank),
        dp=group(lambda at: (at.place.tensor_rank, at.context_rank, at.place.pipeline_rank)),
        mp=group(lambda at: (at.context_rank, at.data_rank)),
        embd=ends or alone,
        pos_embd=alone,
        cp=group(lambda at: (at.place.tensor_rank, at.data_rank, at.place.pipeline_rank)),
        tp_cp=group(lambda at: (at.data_rank, at.place.pipeline_rank)),
        dp_cp=data_context,
        intra_dp_cp=data_context,
        tp_dp_cp=group(lambda at: (at.place.pipeline_rank,)),
        ep=group(
            lambda at: (
                at.place.expert_tensor_rank,
                at.expert_data_rank,
                at.place.pipeline_rank,
            )
        ),
        expt_tp=group(
            lambda at: (at.place.expert_rank, at.expert_data_rank, at.place.pipeline_rank)
        ),
        expt_dp=expert_data,
        intra_expt_dp=expert_data,
        tp_ep=group(lambda at: (at.expert_data_rank, at.place.pipeline_rank)),
        tp_ep_pp=group(lambda at: (at.expert_data_rank,)),
        intra_dist_opt=everyone,
    )
    unset = [name for name in _FIELDS if getattr(collection, name, None) is None]
    assert not unset, f"process groups never built: {unset}"
    return collection


def _expert_place(at: Position) -> tuple[int, int]:
    return at.place.expert_tensor_rank, at.place.expert_rank


def _mine(parts: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Build every group of a partition, in the same order on all ranks; return this rank's."""
    mine = None
    for ranks in parts:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine

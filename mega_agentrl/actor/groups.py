"""The process groups of one policy rank, built once and passed down.

Ranks are numbered tensor first, then data, then pipeline: with tensor t, data d, pipeline p,
rank = t + T * (d + D * p), so that a tensor-parallel group is consecutive (one node). Groups:

    tensor    same d, p      pipeline  same t, d       data   same t, p
    model     same d         embedding first and last stage of a pipeline (tied embedding)
    alone     this rank; stands where Megatron asks for axes this project does not have yet

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

if TYPE_CHECKING:
    from mega_agentrl.config.schema import ParallelConfig

_FIELDS = (
    "tp", "pp", "dp", "mp", "embd", "pos_embd", "cp", "tp_cp", "dp_cp", "intra_dp_cp",
    "tp_dp_cp", "ep", "expt_tp", "expt_dp", "intra_expt_dp", "tp_ep", "tp_ep_pp",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands in the layout, and the layout's sizes."""

    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    pipeline_rank: int
    pipeline_size: int

    @classmethod
    def of(cls, rank: int, layout: ParallelConfig) -> Position:
        """Position of a global rank; raises `ValueError` outside the layout."""
        world = layout.tensor * layout.data * layout.pipeline
        if not 0 <= rank < world:
            raise ValueError(
                f"rank={rank}: expected 0..{world - 1} from parallel.tensor={layout.tensor}, "
                f"parallel.data={layout.data}, parallel.pipeline={layout.pipeline}"
            )
        return cls(
            tensor_rank=rank % layout.tensor,
            tensor_size=layout.tensor,
            data_rank=rank // layout.tensor % layout.data,
            data_size=layout.data,
            pipeline_rank=rank // (layout.tensor * layout.data),
            pipeline_size=layout.pipeline,
        )

    @property
    def first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """Holds the output layer."""
        return self.pipeline_rank == self.pipeline_size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The collection for Megatron and this rank's position."""

    position: Position
    collection: ProcessGroupCollection

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.collection.pp)[-1]


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
    position = Position.of(rank, layout)
    expected = layout.tensor * layout.data * layout.pipeline
    if world_size != expected:
        raise ValueError(
            f"world_size={world_size}: expected {expected} = parallel.tensor * parallel.data * "
            "parallel.pipeline"
        )
    dist.init_process_group(
        device.backend_name(),
        init_method=f"tcp://{master_address}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Groups(position=position, collection=_collection(layout, rank))


def leave() -> None:
    """Give up all groups; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _ranks_where(layout: ParallelConfig, **fixed: int) -> list[int]:
    """Global ranks at the given positions of some axes, any of the others, ascending."""
    places = [
        {"tensor": tensor, "data": data, "pipeline": pipeline}
        for pipeline in range(layout.pipeline)
        for data in range(layout.data)
        for tensor in range(layout.tensor)
    ]
    return [
        rank
        for rank, place in enumerate(places)
        if all(place[axis] == fixed[axis] for axis in fixed)
    ]


def _collection(layout: ParallelConfig, rank: int) -> ProcessGroupCollection:
    def ranks_where(**fixed: int) -> list[int]:
        return _ranks_where(layout, **fixed)

    ts, ds, ps = range(layout.tensor), range(layout.data), range(layout.pipeline)
    pipelines = [ranks_where(tensor=t, data=d) for d in ds for t in ts]
    tensor = _mine([ranks_where(data=d, pipeline=p) for p in ps for d in ds], rank)
    pipeline = _mine(pipelines, rank)
    data = _mine([ranks_where(tensor=t, pipeline=p) for p in ps for t in ts], rank)
    model = _mine([ranks_where(data=d) for d in ds], rank)
    stage = _mine([ranks_where(pipeline=p) for p in ps], rank)
    alone = _mine([[r] for r in range(len(ts) * len(ds) * len(ps))], rank)
    embedding = _mine([sorted({ranks[0], ranks[-1]}) for ranks in pipelines], rank)
    collection = ProcessGroupCollection(
        tp=tensor,
        pp=pipeline,
        dp=data,
        mp=model,
        embd=embedding or alone,
        pos_embd=alone,
        cp=alone,
        tp_cp=tensor,
        dp_cp=data,
        intra_dp_cp=data,
        tp_dp_cp=stage,
        ep=alone,
        expt_tp=tensor,
        expt_dp=data,
        intra_expt_dp=data,
        tp_ep=tensor,
        tp_ep_pp=model,
    )
    unset = [name for name in _FIELDS if getattr(collection, name, None) is None]
    assert not unset, f"process groups never built: {unset}"
    return collection


def _mine(partition: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Build every group of a partition, in the same order on all ranks; return this rank's."""
    mine = None
    for ranks in partition:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine

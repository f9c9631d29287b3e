"""Computes the transfer plan of a weight update from the layouts of all ranks.

    layouts of both sides -> regions -> transfer groups -> buckets with hops, in order -> check

Planning is pure and deterministic: the same input gives the same plan on every rank. Each rollout
rank receives exactly the elements of its own shards, once; no rank assembles a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import ShardLayout, check_disjoint
from mega_agentrl.reshard.planner.broadcast_tree import BucketScheduler, make_pending_buckets
from mega_agentrl.reshard.planner.plan_check import check_transfer_plan
from mega_agentrl.reshard.planner.regions import RankSetCache, compute_regions, rect_owners
from mega_agentrl.reshard.planner.transfer_groups import group_regions, min_network_bytes
from mega_agentrl.reshard.planner.transfer_plan import DTYPE_BYTES, TransferPlan
from mega_agentrl.reshard.topology import LinkSpeeds

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import RectOwners
    from mega_agentrl.reshard.topology import RankLocation

RankLayouts = Sequence[Sequence[ShardLayout]]
"""Shards by rank; ranks with equal shards may share one object."""


def plan_transfer(
    trainer_layouts: RankLayouts,
    rollout_layouts: RankLayouts,
    locations: Sequence[RankLocation],
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
    bucket_bytes: int = 64 * 2**20,
    speeds: LinkSpeeds | None = None,
) -> TransferPlan:
    """Plan the transfer of all weights.

    Args:
        trainer_layouts: Shards of every trainer rank.
        rollout_layouts: Shards of every rollout rank, engine after engine.
        locations: Locations of all ranks, trainer ranks first.
        dtypes: Dtype in which a tensor is sent, by name, or one for all.
        names: Names of all tensors of the model.
        bucket_bytes: Maximum bucket size, unless a single row is larger.
        speeds: Link speeds for which the order is optimized.

    Raises:
        ValueError: If a rollout rank needs an element that no trainer rank holds, an element of a
            rollout shard would be written twice, a dtype is unknown, or the counts do not match.
    """
    if len(locations) != len(trainer_layouts) + len(rollout_layouts) or bucket_bytes < 1:
        raise ValueError(
            f"plan_transfer: {len(locations)} locations, bucket_bytes={bucket_bytes}; expected "
            f"{len(trainer_layouts)} + {len(rollout_layouts)} locations, one per rank, and at "
            "least one byte"
        )
    _check_written_once(rollout_layouts)
    rank_sets = RankSetCache()
    trainer_owners = rect_owners(trainer_layouts, rank_sets)
    rollout_owners = rect_owners(rollout_layouts, rank_sets, first_rank=len(trainer_layouts))
    plan = plan_from_owners(
        trainer_owners, rollout_owners, rank_sets, locations, dtypes,
        names=names, num_trainer_ranks=len(trainer_layouts), bucket_bytes=bucket_bytes,
        speeds=speeds,
    )  # fmt: skip
    check_transfer_plan(plan, trainer_layouts, rollout_layouts)
    return plan


def plan_from_owners(
    trainer_owners: RectOwners,
    rollout_owners: RectOwners,
    rank_sets: RankSetCache,
    locations: Sequence[RankLocation],
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
    num_trainer_ranks: int,
    bucket_bytes: int,
    speeds: LinkSpeeds | None = None,
) -> TransferPlan:
    """Plan from tables of rectangle owners, without checking the result.

    This serves simulations of thousands of ranks with equal layouts. For the arguments see
    `plan_transfer`.

    Args:
        trainer_owners: Rectangles held by trainer ranks.
        rollout_owners: Rectangles needed by rollout ranks.
        rank_sets: The cache that made both tables.
        locations: Locations of all ranks, trainer ranks first.
        dtypes: Dtype in which a tensor is sent, by name, or one for all.
        names: Names of all tensors of the model.
        num_trainer_ranks: Number of trainer ranks.
        bucket_bytes: Maximum bucket size.
        speeds: Link speeds for which the order is optimized.
    """
    dtype_of = {name: _dtype_of(name, dtypes) for name in names}
    item_bytes = {name: DTYPE_BYTES[dtype] for name, dtype in dtype_of.items()}
    groups = group_regions(
        compute_regions(names, trainer_owners, rollout_owners, rank_sets), item_bytes
    )
    buckets = make_pending_buckets(groups, locations, bucket_bytes)
    return TransferPlan(
        num_trainer_ranks=num_trainer_ranks,
        num_rollout_ranks=len(locations) - num_trainer_ranks,
        dtype_of=dtype_of,
        buckets=BucketScheduler(locations, speeds or LinkSpeeds()).schedule(buckets),
        min_network_bytes=min_network_bytes(groups, locations),
    )


def _check_written_once(rollout_layouts: RankLayouts) -> None:
    for layout in {id(layout): layout for layout in rollout_layouts}.values():
        for shard in layout:
            local = [block.local_rect for block in shard.blocks]
            check_disjoint(shard.name, local, owner="transfer plan, a rollout rank")


def _dtype_of(name: str, dtypes: Mapping[str, str] | str) -> str:
    dtype = dtypes if isinstance(dtypes, str) else dtypes.get(name, "none")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: dtype={dtype}, expected one of {', '.join(DTYPE_BYTES)}")
    return dtype

"""Computes the transfer plan of a weight update from the layouts of all ranks.

    layouts of both sides -> regions -> transfer groups -> buckets with hops, in order -> check

Planning is pure and deterministic: the same input gives the same plan on every rank. Each rollout
rank receives exactly the elements of its own shards, once; no rank assembles a whole tensor.

`check_transfer_plan` checks that a plan writes every element of every rollout shard exactly once.
It looks only at hops and rectangles, not at how the plan was made:

    hops   a bucket reaches a rank at most once, from a rank that has it by then; a trainer rank
           has every slice that lies in one of its blocks
    cover  the slices that reach a rank fill the blocks of its shards without hole or overlap, and
           no slice arrives that the rank does not hold
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Rect, ShardLayout, check_disjoint, distinct_layouts
from mega_agentrl.reshard.planner.broadcast_tree import BroadcastPlanner
from mega_agentrl.reshard.planner.regions import RankSetCache, compute_regions, rect_owners
from mega_agentrl.reshard.planner.transfer_groups import group_regions, min_network_bytes
from mega_agentrl.reshard.planner.transfer_plan import DTYPE_BYTES, ParamSliceIndex, TransferPlan

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import RectOwners
    from mega_agentrl.reshard.planner.transfer_groups import TransferGroup
    from mega_agentrl.reshard.planner.transfer_plan import Bucket
    from mega_agentrl.reshard.topology import RankLocation


DEFAULT_BUCKET_BYTES = 64 * 2**20

RankLayouts = Sequence[Sequence[ShardLayout]]
"""Shards by rank; ranks with equal shards may share one object."""


def plan_transfer(
    trainer_layouts: RankLayouts,
    rollout_layouts: RankLayouts,
    locations: Sequence[RankLocation],
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> TransferPlan:
    """Plan the transfer of all weights and check the plan.

    Args:
        trainer_layouts: Shards of every trainer rank.
        rollout_layouts: Shards of every rollout rank, engine after engine.
        locations: Locations of all ranks, trainer ranks first.
        dtypes: Dtype in which a tensor is sent, by name, or one for all.
        names: Names of all tensors of the model, layer by layer.
        bucket_bytes: Maximum bucket size, unless a single row is larger.

    Raises:
        ValueError: If a rollout rank needs an element that no trainer rank holds, an element of a
            rollout shard would be written twice, a dtype is unknown, or the counts do not match.
    """
    if bucket_bytes < 1:
        raise InputError("bucket_bytes", bucket_bytes, "at least one byte")
    if len(locations) != len(trainer_layouts) + len(rollout_layouts):
        expected = f"{len(trainer_layouts)} + {len(rollout_layouts)}, one per rank"
        raise InputError("number of locations", len(locations), expected)
    groups = group_layouts(trainer_layouts, rollout_layouts, dtypes, names=names)
    plan = plan_from_groups(
        groups,
        locations,
        dtypes,
        names=names,
        num_trainer_ranks=len(trainer_layouts),
        bucket_bytes=bucket_bytes,
    )
    check_transfer_plan(plan, trainer_layouts, rollout_layouts)
    return plan


def group_layouts(
    trainer_layouts: RankLayouts,
    rollout_layouts: RankLayouts,
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
) -> list[TransferGroup]:
    """Return the transfer groups, which do not depend on the locations of the ranks.

    The arguments and errors are those of `plan_transfer`.
    """
    _check_written_once(rollout_layouts)
    rank_sets = RankSetCache()
    trainer_owners = rect_owners(trainer_layouts, rank_sets)
    rollout_owners = rect_owners(rollout_layouts, rank_sets, first_rank=len(trainer_layouts))
    return group_owners(trainer_owners, rollout_owners, rank_sets, dtypes, names=names)


def group_owners(
    trainer_owners: RectOwners,
    rollout_owners: RectOwners,
    rank_sets: RankSetCache,
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
) -> list[TransferGroup]:
    """Return the transfer groups of two tables of rectangle owners.

    Simulations of many ranks make these tables without layouts. `rank_sets` is the cache that both
    tables were made with.
    """
    item_bytes = {name: DTYPE_BYTES[dtype] for name, dtype in _dtype_of_each(names, dtypes).items()}
    regions = compute_regions(names, trainer_owners, rollout_owners, rank_sets)
    return group_regions(regions, item_bytes)


def plan_from_groups(
    groups: Sequence[TransferGroup],
    locations: Sequence[RankLocation],
    dtypes: Mapping[str, str] | str,
    *,
    names: Sequence[str],
    num_trainer_ranks: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> TransferPlan:
    """Plan the transfer of the given groups, without checking the result."""
    return TransferPlan(
        num_trainer_ranks=num_trainer_ranks,
        num_rollout_ranks=len(locations) - num_trainer_ranks,
        dtype_of=_dtype_of_each(names, dtypes),
        buckets=BroadcastPlanner(groups, locations, bucket_bytes).make_buckets(),
        min_network_bytes=min_network_bytes(groups, locations),
    )


def _dtype_of_each(names: Sequence[str], dtypes: Mapping[str, str] | str) -> dict[str, str]:
    return {name: _dtype_of(name, dtypes) for name in names}


def _check_written_once(rollout_layouts: RankLayouts) -> None:
    for layout in distinct_layouts(rollout_layouts):
        for shard in layout:
            rects = [block.local_rect for block in shard.blocks]
            check_disjoint(shard.name, rects, owner="transfer plan, a rollout rank")


def _dtype_of(name: str, dtypes: Mapping[str, str] | str) -> str:
    dtype = dtypes if isinstance(dtypes, str) else dtypes.get(name, "none")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype of {name}", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return dtype


_WRONG_LAYOUT_CAUSE = "the plan was made from other layouts"


def check_transfer_plan(
    plan: TransferPlan, trainer_layouts: RankLayouts, rollout_layouts: RankLayouts
) -> None:
    """Raise a `ValueError` naming tensor, rectangle and ranks of the first violation.

    Ranks that share a layout and receive the same buckets are checked once.
    """
    received = _buckets_received(plan, trainer_layouts)
    checked = set()
    for rank, layout in enumerate(rollout_layouts, start=plan.num_trainer_ranks):
        key = (id(layout), tuple(received[rank]))
        if key not in checked:
            _check_received_cover(rank, layout, [plan.buckets[index] for index in received[rank]])
        checked.add(key)


def _buckets_received(plan: TransferPlan, trainer_layouts: RankLayouts) -> dict[int, list[int]]:
    """Return the positions of the buckets that reach each rank, checking every hop."""
    slice_index_of = {
        id(layout): ParamSliceIndex(layout) for layout in distinct_layouts(trainer_layouts)
    }
    received: dict[int, list[int]] = defaultdict(list)
    routes: dict[int, tuple[set[int], list[int]]] = {}  # buckets share their hops
    for position, bucket in enumerate(plan.buckets):
        if id(bucket.hops) not in routes:
            routes[id(bucket.hops)] = _check_hops(plan, bucket)
        sources, targets = routes[id(bucket.hops)]
        for layout in {id(trainer_layouts[source]) for source in sources}:
            for tensor_slice in bucket.slices:
                slice_index_of[layout].check_held(tensor_slice)
        for target in targets:
            received[target].append(position)
    return received


def _check_hops(plan: TransferPlan, bucket: Bucket) -> tuple[set[int], list[int]]:
    """Return the trainer ranks that start a bucket, and all targets."""
    sources: set[int] = set()
    targets: list[int] = []
    for source, target in bucket.hops:
        if target in targets or target not in plan.rollout_ranks:
            name = f"target of bucket {bucket.index} {_describe_bucket(bucket)}"
            expected = "a rollout rank, once"
            raise InputError(name, target, expected, _WRONG_LAYOUT_CAUSE)
        if source < plan.num_trainer_ranks:
            sources.add(source)
        elif source not in targets:
            name = f"source of bucket {bucket.index} {_describe_bucket(bucket)}"
            raise InputError(name, source, "a rank that has received it", _WRONG_LAYOUT_CAUSE)
        targets.append(target)
    return sources, targets


def _describe_bucket(bucket: Bucket) -> str:
    return f"({bucket.slices[0].hf_name} {bucket.slices[0].rect})"


def _check_received_cover(
    rank: int, layout: Iterable[ShardLayout], buckets: Iterable[Bucket]
) -> None:
    owner = f"transfer plan, rollout rank {rank}"
    received_rects: dict[str, list[Rect]] = defaultdict(list)
    for bucket in buckets:
        for tensor_slice in bucket.slices:
            received_rects[tensor_slice.hf_name].append(tensor_slice.rect)
    block_rects: dict[str, set[Rect]] = defaultdict(set)
    for shard in layout:
        for block in shard.blocks:
            block_rects[block.hf_name].add(block.hf_rect)
    for name in {**block_rects, **received_rects}:
        if len(received_rects[name]) == 1 and set(received_rects[name]) == block_rects[name]:
            continue
        check_disjoint(name, received_rects[name], owner=owner)
        for rect in received_rects[name]:
            if not any(whole.contains(rect) for whole in block_rects[name]):
                expected = "a slice that the rank holds"
                raise InputError(f"{owner}, received {name}", rect, expected, _WRONG_LAYOUT_CAUSE)
        for whole in block_rects[name]:
            overlaps = [rect.intersect(whole) for rect in received_rects[name]]
            hole = whole.numel - sum(overlap.numel for overlap in overlaps if overlap)
            if hole:
                raise InputError(
                    f"{owner}, elements of {name} {whole} that do not arrive",
                    hole,
                    f"0 of {whole.numel}",
                    _WRONG_LAYOUT_CAUSE,
                )

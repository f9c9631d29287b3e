"""Check that a plan writes every element of every rollout shard exactly once.

The check looks only at hops and rectangles, not at how the plan was made:

    hops   a bucket reaches a rank at most once, from a rank that has it by then; a trainer rank
           has what lies in one of its blocks
    cover  the slices that reach a rank fill the blocks of its shards without hole or overlap, and
           no slice arrives that the rank does not hold

Ranks that share a layout and receive the same buckets are checked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect, check_disjoint
from mega_agentrl.reshard.planner.transfer_plan import ParamSliceIndex

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import Bucket, TransferPlan

_WRONG_LAYOUT_CAUSE = "probable cause: the plan was made from other layouts"


def check_transfer_plan(
    plan: TransferPlan,
    trainer_layouts: Sequence[Sequence[ShardLayout]],
    rollout_layouts: Sequence[Sequence[ShardLayout]],
) -> None:
    """Raise a `ValueError` naming tensor, rectangle and ranks of the first violation."""
    received = _buckets_received(
        plan,
        [ParamSliceIndex(layout) for layout in _distinct_layouts(trainer_layouts)],
        trainer_layouts,
    )
    done = set()
    for rank, layout in enumerate(rollout_layouts, start=plan.num_trainer_ranks):
        key = (id(layout), tuple(received[rank]))
        if key not in done:
            _check_received_cover(rank, layout, [plan.buckets[index] for index in received[rank]])
        done.add(key)


def _distinct_layouts(
    layouts: Sequence[Sequence[ShardLayout]],
) -> list[Sequence[ShardLayout]]:
    return list({id(layout): layout for layout in layouts}.values())


def _buckets_received(
    plan: TransferPlan,
    slice_indices: list[ParamSliceIndex],
    trainer_layouts: Sequence[Sequence[ShardLayout]],
) -> dict[int, list[int]]:
    """Return the indices of the buckets that reach each rank."""
    numbers = {
        id(layout): number for number, layout in enumerate(_distinct_layouts(trainer_layouts))
    }
    received: dict[int, list[int]] = defaultdict(list)
    for bucket in plan.buckets:
        have_bucket: set[int] = set()
        for source, target in bucket.hops:
            if target in have_bucket or target not in plan.rollout_ranks:
                raise ValueError(
                    f"transfer plan: bucket {bucket.index} {_describe_bucket(bucket)} goes to "
                    f"rank {target} "
                    f"{'twice' if target in have_bucket else 'which is not a rollout rank'}; "
                    f"{_WRONG_LAYOUT_CAUSE}"
                )
            if source < plan.num_trainer_ranks and source not in have_bucket:
                for tensor_slice in bucket.slices:
                    slice_indices[numbers[id(trainer_layouts[source])]].find(tensor_slice)
            elif source not in have_bucket:
                raise ValueError(
                    f"transfer plan: rank {source} forwards bucket {bucket.index} "
                    f"{_describe_bucket(bucket)} before it has received it; {_WRONG_LAYOUT_CAUSE}"
                )
            have_bucket |= {source, target} if source < plan.num_trainer_ranks else {target}
            received[target].append(bucket.index)
    return received


def _describe_bucket(bucket: Bucket) -> str:
    return f"({bucket.slices[0].hf_name} {bucket.slices[0].rect})"


def _check_received_cover(
    rank: int, layout: Iterable[ShardLayout], buckets: Iterable[Bucket]
) -> None:
    owner = f"transfer plan, rollout rank {rank}"
    arrived: dict[str, list[Rect]] = defaultdict(list)
    for bucket in buckets:
        for tensor_slice in bucket.slices:
            arrived[tensor_slice.hf_name].append(tensor_slice.rect)
    wanted: dict[str, set[Rect]] = defaultdict(set)
    for shard in layout:
        for block in shard.blocks:
            wanted[block.hf_name].add(block.hf_rect)
    for name in {**wanted, **arrived}:
        check_disjoint(name, arrived[name], owner=owner)
        for rect in arrived[name]:
            if not any(rect.intersect(whole) == rect for whole in wanted[name]):
                raise ValueError(
                    f"{owner}: {name} {rect} arrives but the rank does not hold it; "
                    f"{_WRONG_LAYOUT_CAUSE}"
                )
        for whole in wanted[name]:
            common = [rect.intersect(whole) for rect in arrived[name]]
            hole = whole.numel - sum(part.numel for part in common if part)
            if hole:
                raise ValueError(
                    f"{owner}: {hole} of {whole.numel} elements of {name} {whole} do not arrive; "
                    f"{_WRONG_LAYOUT_CAUSE}"
                )

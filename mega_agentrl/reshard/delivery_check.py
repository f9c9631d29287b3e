"""Is every element of every rollout shard written exactly once? Asked of a finished plan.

Goes by the hops and the rectangles only, not by how the plan was made:

    way    a bucket reaches a rank at most once, from a rank that has it by then; a trainer
           rank has what lies in one of its blocks
    cover  the pieces that reach a rank fill the blocks of its shards, without a hole or overlap,
           and no piece arrives that it has no place for

Ranks that share a layout and get the same buckets are checked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mega_agentrl.reshard.delivery import Places
from mega_agentrl.reshard.layout import Rect, check_disjoint

if TYPE_CHECKING:
    from mega_agentrl.reshard.delivery import Bucket, DeliveryPlan
    from mega_agentrl.reshard.layout import ShardLayout

_CAUSE = "probable cause: the plan was made from other layouts"


def check_delivery(
    plan: DeliveryPlan,
    sources: Sequence[Sequence[ShardLayout]],
    sinks: Sequence[Sequence[ShardLayout]],
) -> None:
    """Raise `ValueError` naming tensor, rectangle and ranks of the first hole, overlap or hop
    without a cause.
    """
    arriving = _follow_hops(plan, [Places(layout) for layout in _distinct(sources)], sources)
    done = set()
    for sink, layout in enumerate(sinks, start=plan.num_sources):
        key = (id(layout), tuple(arriving[sink]))
        if key not in done:
            _check_cover(sink, layout, [plan.buckets[index] for index in arriving[sink]])
        done.add(key)


def _distinct(
    layouts: Sequence[Sequence[ShardLayout]],
) -> list[Sequence[ShardLayout]]:
    return list({id(layout): layout for layout in layouts}.values())


def _follow_hops(
    plan: DeliveryPlan, places: list[Places], sources: Sequence[Sequence[ShardLayout]]
) -> dict[int, list[int]]:
    """Bucket numbers that reach each rank."""
    numbers = {id(layout): number for number, layout in enumerate(_distinct(sources))}
    arriving: dict[int, list[int]] = defaultdict(list)
    for bucket in plan.buckets:
        having: set[int] = set()
        for source, target in bucket.hops:
            if target in having or target not in plan.sinks:
                raise ValueError(
                    f"delivery plan: bucket {bucket.index} {_first(bucket)} goes to rank {target} "
                    f"{'twice' if target in having else 'which is no rollout rank'}; {_CAUSE}"
                )
            if source < plan.num_sources and source not in having:
                for piece in bucket.pieces:
                    places[numbers[id(sources[source])]].find(piece)
            elif source not in having:
                raise ValueError(
                    f"delivery plan: rank {source} passes on bucket {bucket.index} "
                    f"{_first(bucket)} before it has got it; {_CAUSE}"
                )
            having |= {source, target} if source < plan.num_sources else {target}
            arriving[target].append(bucket.index)
    return arriving


def _first(bucket: Bucket) -> str:
    return f"({bucket.pieces[0].hf_name} {bucket.pieces[0].rect})"


def _check_cover(sink: int, layout: Iterable[ShardLayout], buckets: Iterable[Bucket]) -> None:
    owner = f"delivery plan, rollout rank {sink}"
    arrived: dict[str, list[Rect]] = defaultdict(list)
    for bucket in buckets:
        for piece in bucket.pieces:
            arrived[piece.hf_name].append(piece.rect)
    wanted: dict[str, set[Rect]] = defaultdict(set)
    for shard in layout:
        for block in shard.blocks:
            wanted[block.hf_name].add(block.hf_rect)
    for name in {**wanted, **arrived}:
        check_disjoint(name, arrived[name], owner=owner)
        for rect in arrived[name]:
            if not any(rect.intersect(whole) == rect for whole in wanted[name]):
                raise ValueError(f"{owner}: {name} {rect} arrives and has no place; {_CAUSE}")
        for whole in wanted[name]:
            common = [rect.intersect(whole) for rect in arrived[name]]
            hole = whole.numel - sum(part.numel for part in common if part)
            if hole:
                raise ValueError(
                    f"{owner}: {hole} of {whole.numel} elements of {name} {whole} do not arrive; "
                    f"{_CAUSE}"
                )

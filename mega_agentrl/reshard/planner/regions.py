"""Regions: the parts of each tensor with a constant set of holders and receivers.

A region is a rectangle of a Hugging Face tensor that lies in one block of every trainer rank that
holds it and of every rollout rank that needs it. For one tensor:

    trainer ranks hold    |   r0,r2   |   r1,r3   |
    rollout ranks need    |  s0  |  s1  |  s2  |
    regions               |  a   |b |c  |  d   |    b: held by r0,r2, needed by s1

Regions are disjoint, and together they cover every element that a rollout rank needs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Rect, distinct_layouts

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout

Ranks = tuple[int, ...]
RectOwners = dict[str, dict[Rect, Ranks]]
"""By tensor, every rectangle that a rank has in one block, with all ranks that have it."""


@dataclass(slots=True)
class RankSetCache:
    """Cache of unions of rank tuples, in which equal unions are one object."""

    _interned: dict[Ranks, Ranks] = field(default_factory=dict)
    _unions: dict[tuple[Ranks, ...], Ranks] = field(default_factory=dict)

    def union(self, rank_sets: tuple[Ranks, ...]) -> Ranks:
        """Return the ranks of all sets, ascending."""
        union = self._unions.get(rank_sets)
        if union is None:
            ranks = tuple(sorted(set().union(*rank_sets)))
            union = self._unions[rank_sets] = self._interned.setdefault(ranks, ranks)
        return union


@dataclass(frozen=True, slots=True)
class TransferRegion:
    """A rectangle of a tensor with the ranks that hold it and the ranks that need it."""

    hf_name: str
    rect: Rect
    holders: Ranks
    """Trainer ranks that hold the region."""
    receivers: Ranks
    """Rollout ranks that need the region."""


def rect_owners(
    layouts: Sequence[Sequence[ShardLayout]], rank_sets: RankSetCache, *, first_rank: int = 0
) -> RectOwners:
    """Return the rectangles of the ranks `first_rank`, `first_rank + 1`, ... with their owners.

    Ranks with equal layouts may pass the same object, which is then read once.
    """
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts, start=first_rank):
        ranks_of[id(layout)].append(rank)
    ranks_by_rect: dict[str, dict[Rect, list[Ranks]]] = defaultdict(dict)
    for layout in distinct_layouts(layouts):
        ranks = tuple(ranks_of[id(layout)])
        for shard in layout:
            for block in shard.blocks:
                ranks_by_rect[block.hf_name].setdefault(block.hf_rect, []).append(ranks)
    return {
        name: {rect: rank_sets.union(tuple(owners)) for rect, owners in rects.items()}
        for name, rects in ranks_by_rect.items()
    }


def compute_regions(
    names: Sequence[str],
    trainer_owners: RectOwners,
    rollout_owners: RectOwners,
    rank_sets: RankSetCache,
) -> Iterator[TransferRegion]:
    """Yield all regions, tensor by tensor.

    Args:
        names: Names of all tensors of the model, in the order of the result.
        trainer_owners: Rectangles that trainer ranks hold.
        rollout_owners: Rectangles that rollout ranks need.
        rank_sets: Cache of rank sets.

    Raises:
        ValueError: If only one side has a tensor, or no trainer rank holds a part that is needed.
    """
    _check_same_tensors(names, trainer_owners, rollout_owners)
    for name in names:
        holder_sets = list(trainer_owners[name].values())
        receiver_sets = list(rollout_owners[name].values())
        for rect, held_indices, needed_indices in _split_at_borders(
            tuple(trainer_owners[name]), tuple(rollout_owners[name])
        ):
            receivers = rank_sets.union(tuple(receiver_sets[i] for i in needed_indices))
            if not held_indices:
                raise InputError(
                    f"trainer ranks with {name} {rect}",
                    "none",
                    f"one, as rollout ranks {_shorten(receivers)} need it",
                    "layouts of two different models",
                )
            holders = rank_sets.union(tuple(holder_sets[i] for i in held_indices))
            yield TransferRegion(name, rect, holders, receivers)


def _check_same_tensors(
    names: Sequence[str], trainer_owners: Mapping[str, object], rollout_owners: Mapping[str, object]
) -> None:
    for side, owners in (
        ("trainer ranks hold", trainer_owners),
        ("rollout ranks need", rollout_owners),
    ):
        missing, unknown = sorted(set(names) - set(owners)), sorted(set(owners) - set(names))
        if missing or unknown:
            got = {"missing": _shorten(missing), "unknown": _shorten(unknown)}
            cause = "layouts of two different models"
            raise InputError(f"tensors that {side}", got, "all tensors of the model", cause)


def _shorten(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return f"[{shown}, ... {len(items)} in all]" if len(items) > 8 else f"[{shown}]"


RectOverlap = tuple[Rect, tuple[int, ...], tuple[int, ...]]
Box = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def _split_at_borders(held: tuple[Rect, ...], needed: tuple[Rect, ...]) -> tuple[RectOverlap, ...]:
    """Return each region of a tensor with the indices of the held and needed rects around it.

    The borders of all rectangles form a grid. Adjacent cells of it that lie in the same rectangles
    are merged, along one dim after the other.
    """
    num_dims = len(needed[0].start)
    borders = [
        sorted({end for rect in (*held, *needed) for end in (rect.start[dim], rect.stop[dim])})
        for dim in range(num_dims)
    ]
    index_of = [{border: n for n, border in enumerate(dim_borders)} for dim_borders in borders]
    rects_around: dict[tuple[int, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, rects in enumerate((held, needed)):
        for number, rect in enumerate(rects):
            for cell in itertools.product(
                *(
                    range(index[a], index[b])
                    for index, a, b in zip(index_of, rect.start, rect.stop, strict=True)
                )
            ):
                rects_around[cell][side].append(number)
    cells_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]] = defaultdict(list)
    for cell, (held_indices, needed_indices) in rects_around.items():
        if needed_indices:
            box = tuple((index, index + 1) for index in cell)
            cells_of[tuple(held_indices), tuple(needed_indices)].append(box)
    overlaps = [
        (_box_to_rect(box, borders), *key)
        for key, boxes in cells_of.items()
        for box in _merge_neighbors(boxes)
    ]
    return tuple(sorted(overlaps))


def _merge_neighbors(boxes: list[Box]) -> list[Box]:
    """Merge adjacent boxes of a disjoint set, last dim first."""
    for dim in reversed(range(len(boxes[0]))):
        lines: dict[tuple[Box, Box], list[tuple[int, int]]] = defaultdict(list)
        for box in boxes:
            lines[box[:dim], box[dim + 1 :]].append(box[dim])
        boxes = [
            (*before, run, *after)
            for (before, after), spans in lines.items()
            for run in _merge_intervals(sorted(spans))
        ]
    return boxes


def _merge_intervals(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, stop = spans[0]
    for low, high in spans[1:]:
        if low != stop:
            yield start, stop
            start = low
        stop = high
    yield start, stop


def _box_to_rect(box: Box, borders: list[list[int]]) -> Rect:
    return Rect(
        tuple(ends[low] for ends, (low, _) in zip(borders, box, strict=True)),
        tuple(ends[high] for ends, (_, high) in zip(borders, box, strict=True)),
    )

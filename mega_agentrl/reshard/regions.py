"""Who holds and who wants which part of every tensor, cut into regions where both are constant.

A region is a rectangle of a Hugging Face tensor that lies in one block of every trainer rank
that holds it and of every rollout rank that wants it. For one tensor:

    trainer ranks hold    |   r0,r2   |   r1,r3   |
    rollout ranks want    |  s0  |  s1  |  s2  |
    regions               |  a   |b |c  |  d   |    b: held by r0,r2, wanted by s1

Regions are disjoint and together are all that is wanted. Pure data.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect

if TYPE_CHECKING:
    from mega_agentrl.reshard.layout import ShardLayout

Ranks = tuple[int, ...]
Owned = dict[str, dict[Rect, Ranks]]
"""By tensor, every rectangle that some rank owns in one block, with all ranks that do."""


@dataclass(slots=True)
class RankSets:
    """Unions of rank tuples, equal ones as one object."""

    _known: dict[Ranks, Ranks] = field(default_factory=dict)
    _unions: dict[tuple[Ranks, ...], Ranks] = field(default_factory=dict)

    def union(self, parts: tuple[Ranks, ...]) -> Ranks:
        """All ranks of the parts, ascending."""
        found = self._unions.get(parts)
        if found is None:
            merged = tuple(sorted(set().union(*parts)))
            found = self._unions[parts] = self._known.setdefault(merged, merged)
        return found


@dataclass(frozen=True, slots=True)
class Region:
    """`rect` of tensor `hf_name`: ranks that hold it, ranks that want it."""

    hf_name: str
    rect: Rect
    holders: Ranks
    takers: Ranks


def owned(
    layouts: Sequence[Sequence[ShardLayout]], sets: RankSets, *, first_rank: int = 0
) -> Owned:
    """What the ranks `first_rank`, `first_rank + 1`, ... own.

    Ranks with the same layout may pass the same object, which is then read once.
    """
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for rank, layout in enumerate(layouts, start=first_rank):
        ranks_of[id(layout)].append(rank)
    parts: dict[str, dict[Rect, list[Ranks]]] = defaultdict(dict)
    for layout in {id(layout): layout for layout in layouts}.values():
        ranks = tuple(ranks_of[id(layout)])
        for shard in layout:
            for block in shard.blocks:
                parts[block.hf_name].setdefault(block.hf_rect, []).append(ranks)
    return {
        name: {rect: sets.union(tuple(found)) for rect, found in rects.items()}
        for name, rects in parts.items()
    }


def regions(names: Sequence[str], held: Owned, wanted: Owned, sets: RankSets) -> Iterator[Region]:
    """All regions, in the order of `names`, which are those of all tensors.

    Raises `ValueError` for a tensor that is on one side only and for a part of a tensor that is
    wanted and not held.
    """
    _check_names(names, held, wanted)
    for name in names:
        holding, wanting = list(held[name].values()), list(wanted[name].values())
        for rect, held_in, wanted_in in _cut(tuple(held[name]), tuple(wanted[name])):
            takers = sets.union(tuple(wanting[i] for i in wanted_in))
            if not held_in:
                raise ValueError(
                    f"delivery plan: {name} {rect} is wanted by rollout ranks {_some(takers)} and "
                    "held by no trainer rank; probable cause: layouts of two different models"
                )
            yield Region(name, rect, sets.union(tuple(holding[i] for i in held_in)), takers)


def _check_names(
    names: Sequence[str], held: Mapping[str, object], wanted: Mapping[str, object]
) -> None:
    for side, found in (("trainer ranks hold", held), ("rollout ranks want", wanted)):
        lost, unknown = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        if lost or unknown:
            raise ValueError(
                f"delivery plan: of the model's tensors {side} all but {_some(lost)}, and beside "
                f"them {_some(unknown)}; probable cause: layouts of two different models"
            )


def _some(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return (f"[{shown}, ... {len(items)} in all]" if len(items) > 8 else f"[{shown}]") or "none"


Cut = tuple[Rect, tuple[int, ...], tuple[int, ...]]
Box = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def _cut(held: tuple[Rect, ...], wanted: tuple[Rect, ...]) -> tuple[Cut, ...]:
    """Regions of one tensor: rectangle, which of `held` it lies in, which of `wanted`.

    Coordinates are compressed to the borders that occur; cells of that grid which lie in the
    same rectangles are put together again, along one dim after the other.
    """
    num_dims = len(wanted[0].start)
    marks = [
        sorted({at for rect in (*held, *wanted) for at in (rect.start[dim], rect.stop[dim])})
        for dim in range(num_dims)
    ]
    index_of = [{at: index for index, at in enumerate(line)} for line in marks]
    inside: dict[tuple[int, ...], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, rects in enumerate((held, wanted)):
        for number, rect in enumerate(rects):
            for cell in itertools.product(
                *(
                    range(index[a], index[b])
                    for index, a, b in zip(index_of, rect.start, rect.stop, strict=True)
                )
            ):
                inside[cell][side].append(number)
    cells_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]] = defaultdict(list)
    for cell, (held_in, wanted_in) in inside.items():
        if wanted_in:
            box = tuple((at, at + 1) for at in cell)
            cells_of[tuple(held_in), tuple(wanted_in)].append(box)
    found = [(_rect(box, marks), *key) for key, boxes in cells_of.items() for box in _merged(boxes)]
    return tuple(sorted(found))


def _merged(boxes: list[Box]) -> list[Box]:
    """Disjoint boxes with neighbours put together, last dim first."""
    for dim in reversed(range(len(boxes[0]))):
        lines: dict[tuple[Box, Box], list[tuple[int, int]]] = defaultdict(list)
        for box in boxes:
            lines[box[:dim], box[dim + 1 :]].append(box[dim])
        boxes = [
            (*before, run, *after)
            for (before, after), spans in lines.items()
            for run in _runs(sorted(spans))
        ]
    return boxes


def _runs(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, stop = spans[0]
    for low, high in spans[1:]:
        if low != stop:
            yield start, stop
            start = low
        stop = high
    yield start, stop


def _rect(box: Box, marks: list[list[int]]) -> Rect:
    return Rect(
        tuple(line[low] for line, (low, _) in zip(marks, box, strict=True)),
        tuple(line[high] for line, (_, high) in zip(marks, box, strict=True)),
    )

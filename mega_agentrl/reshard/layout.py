"""Rectangles of Hugging Face tensors: the vocabulary of loading, exporting and resharding.

A shard is a tensor one rank holds. It is described as a list of blocks, each an equal-shaped
pair of rectangles: one in a Hugging Face tensor, one in the shard. Coordinates are half-open
and one pair per dim: ``Rect((8, 0), (16, 128))`` is rows 8..15, columns 0..127. Elements of a
shard that no block covers are padding (vocabulary rows beyond the model's own).

Pure data; knows neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Half-open box [start, stop) in element coordinates, one entry per dim."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"Rect: start {self.start} and stop {self.stop} differ in rank")
        if any(b <= a or a < 0 for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"Rect: [{self.start}, {self.stop}) is empty or negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Rect:
        """The rectangle of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def sides(self) -> tuple[int, ...]:
        """The extents that are more than one element."""
        return tuple(side for side in self.shape if side > 1)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects it from a tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Rect) -> Rect | None:
        """The common part, None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Rect(start, stop)

    def shifted(self, origin: tuple[int, ...], to: tuple[int, ...]) -> Rect:
        """The same box after moving the point `origin` to `to`."""
        delta = tuple(b - a for a, b in zip(origin, to, strict=True))
        return Rect(
            tuple(a + d for a, d in zip(self.start, delta, strict=True)),
            tuple(b + d for b, d in zip(self.stop, delta, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """`hf_rect` of tensor `hf_name` is `local_rect` of the shard, element by element.

    Shapes are equal, dims of one element aside: an expert's matrix is one slice of a stack.
    """

    hf_name: str
    hf_rect: Rect
    local_rect: Rect

    def __post_init__(self) -> None:
        if self.hf_rect.sides != self.local_rect.sides:
            raise ValueError(
                f"Block of {self.hf_name}: {self.hf_rect.shape} in the Hugging Face tensor "
                f"against {self.local_rect.shape} in the shard"
            )


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Parameter `name` of one rank: its local shape and the blocks it is made of."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def check_cover(
    hf_shapes: Mapping[str, tuple[int, ...]], shards: Iterable[ShardLayout], *, owner: str
) -> None:
    """Check that the shards together hold every element of every tensor exactly once.

    hf_shapes: full shape by Hugging Face name. shards: of all ranks, one replica each.
    Raises `ValueError` that lists unknown and missing tensors, names an overlap or the
    number of elements of a hole. `owner` says whose shards these are, for the message.
    """
    pieces: dict[str, list[Rect]] = defaultdict(list)
    for shard in shards:
        for block in shard.blocks:
            pieces[block.hf_name].append(block.hf_rect)
    unknown = sorted(set(pieces) - set(hf_shapes))
    missing = sorted(set(hf_shapes) - set(pieces))
    if unknown or missing:
        raise ValueError(
            f"{owner}: tensors without a place {missing or 'none'}; places without a tensor "
            f"{unknown or 'none'}; probable cause: the model folder holds another architecture"
        )
    for name, shape in hf_shapes.items():
        rects = sorted(pieces[name])
        whole = Rect.whole(shape)
        for rect in rects:
            if rect.intersect(whole) != rect:
                raise ValueError(f"{owner}: {name} has shape {shape}, a block reaches {rect}")
        check_disjoint(name, rects, owner=owner)
        hole = whole.numel - sum(rect.numel for rect in rects)
        if hole:
            raise ValueError(f"{owner}: {hole} of {whole.numel} elements of {name} have no place")


def check_disjoint(name: str, rects: Iterable[Rect], *, owner: str) -> None:
    """Raise `ValueError` naming two rectangles of tensor `name` that overlap."""
    rects = sorted(rects)
    for position, rect in enumerate(rects):
        for other in rects[position + 1 :]:
            if other.start[:1] >= rect.stop[:1]:
                break
            if rect.intersect(other):
                raise ValueError(f"{owner}: {name} holds {rect} and {other}, which overlap")

"""Which rectangles of Hugging Face tensors a rank holds, for loading, exporting and resharding.

A shard is a tensor that one rank holds. A `ShardLayout` describes it as a list of blocks. Each
block pairs a rectangle of a Hugging Face tensor with an equally shaped rectangle of the shard.
Coordinates are half-open, with one entry per dim: ``Rect((8, 0), (16, 128))`` is rows 8..15 and
columns 0..127. Elements of a shard that no block covers are padding, such as vocabulary rows
beyond the model's own.
"""

from __future__ import annotations

import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from operator import ge, le, sub
from typing import NamedTuple, Self

from mega_agentrl.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Half-open rectangle [start, stop), in elements."""

    start: tuple[int, ...]
    """First element, per dim."""
    stop: tuple[int, ...]
    """One past the last element, per dim."""

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"Rect: start {self.start} and stop {self.stop} differ in rank")
        if any(map(ge, self.start, self.stop)) or min(self.start, default=0) < 0:
            raise ValueError(f"Rect: [{self.start}, {self.stop}) is empty or negative")

    def __reduce__(self) -> tuple[type[Rect], tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pickle without the names of the fields; a plan has hundreds of thousands of these."""
        return Rect, (self.start, self.stop)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Rect:
        """Return the rectangle that covers a tensor of the given shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def squeezed_shape(self) -> tuple[int, ...]:
        """Extents larger than one element."""
        return tuple(side for side in self.shape if side > 1)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the rectangle from a tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Rect) -> Rect | None:
        """Return the intersection with `other`, or None if they do not overlap."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(map(ge, start, stop)) else Rect(start, stop)

    def contains(self, other: Rect) -> bool:
        """Return whether `other`, of the same rank, lies inside."""
        return all(map(le, self.start, other.start)) and all(map(ge, self.stop, other.stop))

    def translate(self, origin: tuple[int, ...], to: tuple[int, ...]) -> Rect:
        """Return the rectangle moved by the vector from `origin` to `to`."""
        delta = tuple(b - a for a, b in zip(origin, to, strict=True))
        return Rect(
            tuple(a + d for a, d in zip(self.start, delta, strict=True)),
            tuple(b + d for b, d in zip(self.stop, delta, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a Hugging Face tensor and where a shard holds it.

    The two rectangles have equal shapes except for dims of size one: vLLM stacks the matrices of
    all experts, so that one expert's matrix is a slice of the stack.
    """

    hf_name: str
    """Name of the Hugging Face tensor."""
    hf_rect: Rect
    """Rectangle in the Hugging Face tensor."""
    local_rect: Rect
    """Rectangle in the shard."""

    def __post_init__(self) -> None:
        if self.hf_rect.squeezed_shape != self.local_rect.squeezed_shape:
            raise ValueError(
                f"Block of {self.hf_name}: {self.hf_rect.shape} in the Hugging Face tensor "
                f"against {self.local_rect.shape} in the shard"
            )


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Blocks of Hugging Face tensors that one parameter of one rank holds."""

    name: str
    """Parameter name on its rank."""
    shape: tuple[int, ...]
    """Local shape of the parameter."""
    blocks: tuple[Block, ...]
    """Parts of Hugging Face tensors that the parameter consists of."""


class PackedLayout(NamedTuple):
    """A rank's shards as bytes; equal digests mean equal shards."""

    digest: bytes
    pickled: bytes

    @classmethod
    def pack(cls, layout: Sequence[ShardLayout]) -> Self:
        """Pack the shards of a rank."""
        pickled = pickle.dumps(list(layout))
        return cls(sha256(pickled).digest(), zlib.compress(pickled, level=1))

    def unpack(self) -> list[ShardLayout]:
        """Return the shards; only for bytes from our own processes."""
        layout: list[ShardLayout] = pickle.loads(zlib.decompress(self.pickled))
        return layout


def check_cover(
    hf_shapes: Mapping[str, tuple[int, ...]], shards: Iterable[ShardLayout], *, owner: str
) -> None:
    """Check that the shards together hold every element of every tensor exactly once.

    Args:
        hf_shapes: Full shape by Hugging Face name.
        shards: Shards of all ranks, one replica each.
        owner: Whose shards these are, for the error message.

    Raises:
        ValueError: If tensors are unknown or missing, rectangles overlap, or elements are not held.
    """
    rects_of: dict[str, list[Rect]] = defaultdict(list)
    for shard in shards:
        for block in shard.blocks:
            rects_of[block.hf_name].append(block.hf_rect)
    unknown = sorted(set(rects_of) - set(hf_shapes))
    missing = sorted(set(hf_shapes) - set(rects_of))
    if unknown or missing:
        got = {"tensors that no shard holds": missing, "unknown tensors": unknown}
        cause = "the model folder holds another architecture"
        raise InputError(f"{owner}, tensors", got, "the tensors of the model", cause)
    for name, shape in hf_shapes.items():
        rects = sorted(rects_of[name])
        whole = Rect.whole(shape)
        for rect in rects:
            if rect.intersect(whole) != rect:
                raise InputError(f"{owner}, block of {name}", rect, f"a part of its shape {shape}")
        check_disjoint(name, rects, owner=owner)
        hole = whole.numel - sum(rect.numel for rect in rects)
        if hole:
            raise InputError(
                f"{owner}, elements of {name} in no shard", hole, f"0 of {whole.numel}"
            )


def check_disjoint(name: str, rects: Iterable[Rect], *, owner: str) -> None:
    """Raise a `ValueError` naming two rectangles of tensor `name` if any overlap."""
    rects = sorted(rects)
    for position, rect in enumerate(rects):
        for other in rects[position + 1 :]:
            if other.start[:1] >= rect.stop[:1]:
                break
            if rect.intersect(other):
                raise InputError(f"{owner}, blocks of {name}", (rect, other), "no overlap")


def distinct_layouts(
    layouts: Sequence[Sequence[ShardLayout]],
) -> list[Sequence[ShardLayout]]:
    """Return each layout object once; ranks with equal shards may share one."""
    return list({id(layout): layout for layout in layouts}.values())


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple

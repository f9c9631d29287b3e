"""The plan of a weight update: which bytes go from which rank to which, and in what order.

Ranks are numbered over both sides: trainer ranks first, rollout ranks after them. A bucket is
what travels in one go: pieces that the same trainer ranks hold and the same rollout ranks want.
Its hops are in causal order: who sends in a hop holds the bucket from the start (a trainer
rank) or has received it in an earlier hop (a rollout rank that passes it on).

All ranks execute their hops in the order of (bucket, hop). The earliest hop that is not done
waits for nothing then, so no ranks wait for each other in a circle. A piece names a rectangle
of the Hugging Face tensor; each rank finds its place in its own shards (`places`).

Data and look-ups; `plan` makes it, `delivery_check` checks it, `traffic` counts it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from mega_agentrl.reshard.layout import Rect, ShardLayout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the types weights may travel in."""


class Piece(NamedTuple):
    """`rect` of tensor `hf_name`; num_bytes: in the type it travels in."""

    hf_name: str
    rect: Rect
    num_bytes: int


class Hop(NamedTuple):
    """From one rank to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """index: place in the order of the plan."""

    index: int
    num_bytes: int
    pieces: tuple[Piece, ...]
    hops: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class DeliveryPlan:
    """Everything that all ranks must agree on.

    dtype_of: wire type by Hugging Face name. least_network_bytes: what has to cross between
    machines whatever the plan, counted before there was one.
    """

    num_sources: int
    num_sinks: int
    dtype_of: dict[str, str]
    buckets: tuple[Bucket, ...]
    least_network_bytes: int = 0

    @property
    def world_size(self) -> int:
        """Ranks of both sides."""
        return self.num_sources + self.num_sinks

    @property
    def sinks(self) -> range:
        """Ranks that want weights."""
        return range(self.num_sources, self.world_size)

    def hops_of(self, rank: int) -> Iterator[tuple[Bucket, Hop]]:
        """Everything one rank sends or receives, in the order in which it must."""
        for bucket in self.buckets:
            for hop in bucket.hops:
                if rank in hop:
                    yield bucket, hop

    def part_of(self, ranks: Collection[int], layouts: Iterable[Iterable[ShardLayout]]) -> Self:
        """What some ranks need of it to do their part. layouts: of these ranks.

        Buckets keep their numbers; hops between other ranks and types of tensors that these
        ranks do not hold are left out, so that a large plan need not go everywhere whole.
        """
        names = {block.hf_name for layout in layouts for s in layout for block in s.blocks}
        parts = (
            (bucket, tuple(h for h in bucket.hops if h.source in ranks or h.target in ranks))
            for bucket in self.buckets
        )
        return replace(
            self,
            dtype_of={name: self.dtype_of[name] for name in self.dtype_of.keys() & names},
            buckets=tuple(replace(bucket, hops=hops) for bucket, hops in parts if hops),
        )


class Place(NamedTuple):
    """A rectangle of a parameter of one rank."""

    param: str
    rect: Rect


class Places:
    """Finds pieces in the shards of one rank."""

    def __init__(self, layout: Iterable[ShardLayout]) -> None:
        self._blocks: dict[str, list[tuple[Rect, str, Rect]]] = defaultdict(list)
        for shard in layout:
            for block in shard.blocks:
                self._blocks[block.hf_name].append((block.hf_rect, shard.name, block.local_rect))

    def find(self, piece: Piece) -> list[Place]:
        """Every place of a piece: one on a trainer rank, one or more on a rollout rank.

        Raises `ValueError` where the rank has none.
        """
        places = []
        for hf_rect, param, local_rect in self._blocks.get(piece.hf_name, ()):
            if piece.rect.intersect(hf_rect) == piece.rect:
                places.append(Place(param, inside(piece.rect, hf_rect, local_rect)))
        if not places:
            raise ValueError(
                f"{piece.hf_name} {piece.rect} lies in no block of this rank, expected one; "
                "probable cause: the plan was made from other layouts"
            )
        return places


def inside(rect: Rect, hf_rect: Rect, local_rect: Rect) -> Rect:
    """Where a part `rect` of `hf_rect` is in `local_rect`, or the other way round: two boxes that
    are equal but for dims of one element.
    """
    sides = [dim for dim, side in enumerate(hf_rect.shape) if side > 1]
    start, stop = list(local_rect.start), list(local_rect.stop)
    local_sides = (dim for dim, side in enumerate(local_rect.shape) if side > 1)
    for dim, local in zip(sides, local_sides, strict=True):
        shift = local_rect.start[local] - hf_rect.start[dim]
        start[local], stop[local] = rect.start[dim] + shift, rect.stop[dim] + shift
    return Rect(tuple(start), tuple(stop))

"""Regions gathered into lanes and cut into buckets.

All regions with the same holders and the same takers take the same way: together they are a
lane. A lane is cut into buckets of at most the given size, along the first dim of regions that
are larger; and into at least as many as it has holders, so that replicas share the sending,
unless that makes buckets too small to be worth a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.reshard.delivery import Piece
from mega_agentrl.reshard.layout import Rect

if TYPE_CHECKING:
    from mega_agentrl.reshard.links import Location
    from mega_agentrl.reshard.regions import Ranks, Region

SMALL_BUCKET_BYTES = 2**20


@dataclass(slots=True)
class Lane:
    """What goes from any of `holders` to all of `takers`."""

    holders: Ranks
    takers: Ranks
    num_bytes: int = 0
    pieces: list[Piece] = field(default_factory=list)


def gather(regions: Iterable[Region], item_bytes: Mapping[str, int]) -> list[Lane]:
    """Lanes in the order of their first region. item_bytes: per element, by tensor."""
    lanes: dict[tuple[Ranks, Ranks], Lane] = {}
    for region in regions:
        key = (region.holders, region.takers)
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = Lane(*key)
        num_bytes = region.rect.numel * item_bytes[region.hf_name]
        lane.num_bytes += num_bytes
        lane.pieces.append(Piece(region.hf_name, region.rect, num_bytes))
    return list(lanes.values())


def least_network_bytes(lanes: Iterable[Lane], locations: Sequence[Location]) -> int:
    """Bytes that machines want and do not hold: each has to cross between machines once."""
    total = 0
    for lane in lanes:
        holding = {locations[rank].node for rank in lane.holders}
        wanting = {locations[rank].node for rank in lane.takers}
        total += lane.num_bytes * len(wanting - holding)
    return total


def fill(lane: Lane, bucket_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """The lane's pieces bucket by bucket, each of at most `bucket_bytes`, or one row."""
    share = -(-lane.num_bytes // len(lane.holders))
    limit = min(bucket_bytes, max(share, SMALL_BUCKET_BYTES))
    bucket: list[Piece] = []
    size = 0
    for whole in lane.pieces:
        for piece in _cut(whole, limit):
            if bucket and size + piece.num_bytes > limit:
                yield tuple(bucket)
                bucket, size = [], 0
            bucket.append(piece)
            size += piece.num_bytes
    yield tuple(bucket)


def _cut(piece: Piece, limit: int) -> Iterator[Piece]:
    """Slices along the first dim, at least one row each."""
    if piece.num_bytes <= limit or not piece.rect.start:
        yield piece
        return
    rect = piece.rect
    first, last = rect.start[0], rect.stop[0]
    row_bytes = piece.num_bytes // (last - first)
    rows = max(1, limit // row_bytes)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        part = Rect((start, *rect.start[1:]), (stop, *rect.stop[1:]))
        yield Piece(piece.hf_name, part, row_bytes * (stop - start))

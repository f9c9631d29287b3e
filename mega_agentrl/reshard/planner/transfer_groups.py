"""Grouping of regions by holders and receivers, and splitting of groups into buckets.

All regions with the same holders and the same receivers take the same path and form one transfer
group. A group is split into buckets of at most the given size; larger regions are split along
their first dim. There are at least as many buckets as holders, so that replicas share the sending,
unless that would make buckets smaller than `MIN_BUCKET_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.transfer_plan import TensorSlice

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import Ranks, TransferRegion
    from mega_agentrl.reshard.topology import RankLocation

MIN_BUCKET_BYTES = 2**20
"""Below this size, the cost per message outweighs sharing the work between replicas."""


@dataclass(slots=True)
class TransferGroup:
    """Slices that go from any of `holders` to all of `receivers`."""

    holders: Ranks
    receivers: Ranks
    num_bytes: int = 0
    slices: list[TensorSlice] = field(default_factory=list)


def group_regions(
    regions: Iterable[TransferRegion], item_bytes: Mapping[str, int]
) -> list[TransferGroup]:
    """Return the groups in the order of their first region.

    Args:
        regions: Regions of all tensors.
        item_bytes: Bytes per element, by tensor.
    """
    groups: dict[tuple[Ranks, Ranks], TransferGroup] = {}
    for region in regions:
        key = (region.holders, region.receivers)
        group = groups.get(key)
        if group is None:
            group = groups[key] = TransferGroup(*key)
        num_bytes = region.rect.numel * item_bytes[region.hf_name]
        group.num_bytes += num_bytes
        group.slices.append(TensorSlice(region.hf_name, region.rect, num_bytes))
    return list(groups.values())


def min_network_bytes(groups: Iterable[TransferGroup], locations: Sequence[RankLocation]) -> int:
    """Return the bytes that must cross between machines at least.

    Each byte that a machine needs and does not hold has to enter it once.
    """
    total = 0
    for group in groups:
        holding = {locations[rank].node for rank in group.holders}
        wanting = {locations[rank].node for rank in group.receivers}
        total += group.num_bytes * len(wanting - holding)
    return total


def split_into_buckets(
    group: TransferGroup, bucket_bytes: int
) -> Iterator[tuple[TensorSlice, ...]]:
    """Yield the slices of a group by bucket, each of at most `bucket_bytes` or one row."""
    share = -(-group.num_bytes // len(group.holders))
    limit = min(bucket_bytes, max(share, MIN_BUCKET_BYTES))
    bucket: list[TensorSlice] = []
    size = 0
    for tensor_slice in group.slices:
        for part in _split_slice(tensor_slice, limit):
            if bucket and size + part.num_bytes > limit:
                yield tuple(bucket)
                bucket, size = [], 0
            bucket.append(part)
            size += part.num_bytes
    yield tuple(bucket)


def _split_slice(tensor_slice: TensorSlice, limit: int) -> Iterator[TensorSlice]:
    """Split a slice along its first dim into parts of at least one row."""
    if tensor_slice.num_bytes <= limit or not tensor_slice.rect.start:
        yield tensor_slice
        return
    rect = tensor_slice.rect
    first, last = rect.start[0], rect.stop[0]
    row_bytes = tensor_slice.num_bytes // (last - first)
    rows = max(1, limit // row_bytes)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        part = Rect((start, *rect.start[1:]), (stop, *rect.stop[1:]))
        yield TensorSlice(tensor_slice.hf_name, part, row_bytes * (stop - start))

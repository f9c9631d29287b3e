"""Transfer groups: slices of one layer with the same holders and the same receivers.

An update goes through the model layer by layer; a tensor outside of the layers is a unit of its
own. A module of an engine has all its weights in one unit, so a rank that receives the units one
after another never has modules of two units in memory that are begun but not complete.

A group is split into buckets of at most the given size; larger slices are split along their first
dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.transfer_plan import TensorSlice

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import Ranks, TransferRegion
    from mega_agentrl.reshard.topology import RankLocation

_LAYER_NAME = re.compile(r".*\.layers\.\d+\.")


@dataclass(slots=True)
class TransferGroup:
    """Slices of one unit that go from any of `holders` to all of `receivers`."""

    unit: str
    """Result of `transfer_unit` for the tensors of the group."""
    holders: Ranks
    receivers: Ranks
    num_bytes: int = 0
    slices: list[TensorSlice] = field(default_factory=list)


@lru_cache(maxsize=2**17)
def transfer_unit(hf_name: str) -> str:
    """Return the unit in which a tensor is sent: its layer's prefix, or the tensor alone."""
    match = _LAYER_NAME.match(hf_name)
    return match[0] if match else hf_name


def group_regions(
    regions: Iterable[TransferRegion], item_bytes: Mapping[str, int]
) -> list[TransferGroup]:
    """Return the groups, unit by unit, each in the order of its first region.

    Args:
        regions: Regions of all tensors, those of a unit in sequence.
        item_bytes: Bytes per element, by tensor.
    """
    groups: dict[tuple[str, Ranks, Ranks], TransferGroup] = {}
    for region in regions:
        key = (transfer_unit(region.hf_name), region.holders, region.receivers)
        group = groups.get(key)
        if group is None:
            group = groups[key] = TransferGroup(*key)
        num_bytes = region.rect.numel * item_bytes[region.hf_name]
        group.num_bytes += num_bytes
        group.slices.append(TensorSlice(region.hf_name, region.rect, num_bytes))
    return list(groups.values())


def min_network_bytes(groups: Iterable[TransferGroup], locations: Sequence[RankLocation]) -> int:
    """Return the bytes that must at least cross between machines.

    Each byte that a machine needs and does not hold has to enter it once.
    """
    bytes_of: dict[tuple[Ranks, Ranks], int] = {}
    for group in groups:
        key = (group.holders, group.receivers)
        bytes_of[key] = bytes_of.get(key, 0) + group.num_bytes
    total = 0
    for (holders, receivers), num_bytes in bytes_of.items():
        holder_nodes = {locations[rank].node for rank in holders}
        receiver_nodes = {locations[rank].node for rank in receivers}
        total += num_bytes * len(receiver_nodes - holder_nodes)
    return total


def split_into_buckets(group: TransferGroup, limit: int) -> Iterator[tuple[TensorSlice, ...]]:
    """Yield the slices of a group by bucket, each of at most `limit` bytes or one row."""
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

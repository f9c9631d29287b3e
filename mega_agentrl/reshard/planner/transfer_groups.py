"""Transfer groups: slices of one layer with the same holders and the same receivers.

An update goes through the model layer by layer, blocks of a vision tower included; a tensor outside
of the layers is a unit of its own. A module of an engine has all its weights in one unit, except
for the biases of a tower's mergers, so a rank that receives the units one after another has hardly
any incomplete modules of two units in memory.

A group is split into equal buckets of at most the given size; slices are split along their first
dim.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.transfer_plan import TensorSlice

if TYPE_CHECKING:
    from mega_agentrl.reshard.planner.regions import Ranks, TransferRegion
    from mega_agentrl.reshard.topology import RankLocation

_LAYER_NAME = re.compile(r".*\.(?:layers|visual\.blocks)\.\d+\.|visual\.blocks\.\d+\.")


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
        regions: Regions of all tensors, unit by unit.
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


def merge_units(groups: Iterable[TransferGroup], max_bytes: int) -> list[list[TransferGroup]]:
    """Return the groups by unit, merging successive units while they are small for every rank.

    Args:
        groups: Result of `group_regions`.
        max_bytes: Maximum number of bytes that a rank receives in a merged unit.
    """
    merged: list[list[TransferGroup]] = []
    received: Counter[int] = Counter()
    for _, unit in itertools.groupby(groups, key=lambda group: group.unit):
        unit_groups = list(unit)
        unit_bytes: Counter[int] = Counter()
        for group in unit_groups:
            for rank in group.receivers:
                unit_bytes[rank] += group.num_bytes
        received += unit_bytes
        if merged and max(received.values()) <= max_bytes:
            merged[-1] += unit_groups
        else:
            merged.append(unit_groups)
            received = unit_bytes
    return [_join_groups(unit) for unit in merged]


def _join_groups(unit: Sequence[TransferGroup]) -> list[TransferGroup]:
    """Return one group for each pair of holders and receivers."""
    groups: dict[tuple[Ranks, Ranks], TransferGroup] = {}
    for group in unit:
        key = (group.holders, group.receivers)
        joined = groups.get(key)
        if joined is None:
            groups[key] = group
        else:
            groups[key] = TransferGroup(
                joined.unit,
                *key,
                joined.num_bytes + group.num_bytes,
                [*joined.slices, *group.slices],
            )
    return list(groups.values())


def min_network_bytes(groups: Iterable[TransferGroup], locations: Sequence[RankLocation]) -> int:
    """Return the minimum number of bytes that must cross between machines.

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


def split_into_buckets(
    group: TransferGroup, max_bytes: int, multiple_of: int = 1
) -> list[tuple[TensorSlice, ...]]:
    """Return the slices of a group by bucket.

    Buckets are equal up to one row, so that none is almost empty.

    Args:
        group: The group.
        max_bytes: Maximum size of a bucket, unless a single row is larger.
        multiple_of: Divisor of the number of buckets, if there are enough rows.
    """
    if group.num_bytes <= max_bytes and multiple_of == 1:
        return [tuple(group.slices)]
    for factor in itertools.count(max(1, -(-group.num_bytes // (max_bytes * multiple_of)))):
        buckets = _cut(group, factor * multiple_of)
        if all(_fits(bucket, max_bytes) for bucket in buckets):
            return buckets
    raise AssertionError("buckets of one row fit any size")


def _fits(bucket: Sequence[TensorSlice], max_bytes: int) -> bool:
    is_one_row = len(bucket) == 1 and _num_rows(bucket[0]) == 1
    return is_one_row or sum(tensor_slice.num_bytes for tensor_slice in bucket) <= max_bytes


def _num_rows(tensor_slice: TensorSlice) -> int:
    rect = tensor_slice.rect
    return rect.stop[0] - rect.start[0] if rect.start else 1


def _cut(group: TransferGroup, num_parts: int) -> list[tuple[TensorSlice, ...]]:
    """Cut a group into parts of equal bytes, between rows; leave out empty parts."""
    parts: list[list[TensorSlice]] = [[] for _ in range(num_parts)]
    end = 0
    for tensor_slice in group.slices:
        row_bytes, row = tensor_slice.num_bytes // _num_rows(tensor_slice), 0
        while row < _num_rows(tensor_slice):
            # The part in which the next row ends, and the number of rows up to the part's end.
            number = (end + row_bytes - 1) * num_parts // group.num_bytes
            share_end = -(-(number + 1) * group.num_bytes // num_parts)
            num_rows = min((share_end - end) // row_bytes, _num_rows(tensor_slice) - row)
            parts[number].append(_rows_of(tensor_slice, row, row + num_rows))
            row, end = row + num_rows, end + num_rows * row_bytes
    return [tuple(part) for part in parts if part]


def _rows_of(tensor_slice: TensorSlice, first: int, last: int) -> TensorSlice:
    """Return rows `first` to `last - 1` of a slice."""
    rect, num_rows = tensor_slice.rect, _num_rows(tensor_slice)
    if last - first == num_rows:
        return tensor_slice
    start = rect.start[0]
    part = Rect((start + first, *rect.start[1:]), (start + last, *rect.stop[1:]))
    num_bytes = tensor_slice.num_bytes // num_rows * (last - first)
    return TensorSlice(tensor_slice.hf_name, part, num_bytes)

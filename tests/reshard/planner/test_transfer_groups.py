"""Transfer groups gather what goes the same way; buckets keep to their size and lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block as LayoutBlock
from mega_agentrl.reshard.layout import Rect, ShardLayout, check_cover
from mega_agentrl.reshard.planner.regions import TransferRegion
from mega_agentrl.reshard.planner.transfer_groups import (
    MIN_BUCKET_BYTES,
    TransferGroup,
    group_regions,
    min_network_bytes,
    split_into_buckets,
)
from mega_agentrl.reshard.planner.transfer_plan import TensorSlice
from mega_agentrl.reshard.topology import RankLocation


def tensor_slice(name, num_rows, row_bytes=4):
    return TensorSlice(name, Rect.whole((num_rows, row_bytes // 4)), num_rows * row_bytes)


def group_of(*slices, holders=(0,)):
    return TransferGroup(holders, (9,), sum(p.num_bytes for p in slices), list(slices))


def test_regions_with_equal_ranks_share_a_group():
    found = group_regions(
        [
            TransferRegion("a", Rect((0,), (2,)), (0,), (2, 3)),
            TransferRegion("a", Rect((2,), (4,)), (1,), (2, 3)),
            TransferRegion("b", Rect((0,), (8,)), (0,), (2, 3)),
        ],
        {"a": 4, "b": 2},
    )
    assert [(group.holders, group.receivers, group.num_bytes) for group in found] == [
        ((0,), (2, 3), 24),
        ((1,), (2, 3), 8),
    ]
    assert [p.hf_name for p in found[0].slices] == ["a", "b"]


def test_a_region_larger_than_a_bucket_is_cut_by_rows():
    buckets = list(split_into_buckets(group_of(tensor_slice("w", 10)), 12))
    spans = [(p.rect.start[0], p.rect.stop[0]) for bucket in buckets for p in bucket]
    assert spans == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_a_group_of_replicas_has_a_bucket_for_each_of_them_if_that_is_worth_it():
    large = tensor_slice("w", 8, row_bytes=MIN_BUCKET_BYTES)
    assert len(list(split_into_buckets(group_of(large, holders=(0, 1, 2, 3)), 2**40))) == 4
    assert (
        len(list(split_into_buckets(group_of(tensor_slice("w", 8), holders=(0, 1, 2, 3)), 2**40)))
        == 1
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 100))
def test_buckets_hold_every_row_once_and_keep_to_their_size(counts, bucket_bytes):
    slices = [tensor_slice(f"w{i}", count) for i, count in enumerate(counts)]
    buckets = list(split_into_buckets(group_of(*slices), bucket_bytes))
    assert all(sum(p.num_bytes for p in bucket) <= max(bucket_bytes, 4) for bucket in buckets)
    shards = [
        ShardLayout("s", (), (LayoutBlock(p.hf_name, p.rect, p.rect),))
        for bucket in buckets
        for p in bucket
    ]
    check_cover({p.hf_name: p.rect.stop for p in slices}, shards, owner="test")


@pytest.mark.parametrize(("receivers", "expected"), [((2, 3), 10), ((0, 1), 0), ((2, 4), 20)])
def test_a_machine_that_holds_nothing_is_entered_once(receivers, expected):
    nodes = [RankLocation(node) for node in (0, 0, 1, 1, 2)]
    assert min_network_bytes([TransferGroup((0, 1), receivers, 10)], nodes) == expected

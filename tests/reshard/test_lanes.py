"""Lanes gather what goes the same way; buckets keep to their size and lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.delivery import Piece
from mega_agentrl.reshard.lanes import (
    SMALL_BUCKET_BYTES,
    Lane,
    fill,
    gather,
    least_network_bytes,
)
from mega_agentrl.reshard.layout import Block as LayoutBlock
from mega_agentrl.reshard.layout import Rect, ShardLayout, check_cover
from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.regions import Region


def piece(name, num_rows, row_bytes=4):
    return Piece(name, Rect.whole((num_rows, row_bytes // 4)), num_rows * row_bytes)


def lane_of(*pieces, holders=(0,)):
    return Lane(holders, (9,), sum(p.num_bytes for p in pieces), list(pieces))


def test_regions_with_equal_ranks_share_a_lane():
    found = gather(
        [
            Region("a", Rect((0,), (2,)), (0,), (2, 3)),
            Region("a", Rect((2,), (4,)), (1,), (2, 3)),
            Region("b", Rect((0,), (8,)), (0,), (2, 3)),
        ],
        {"a": 4, "b": 2},
    )
    assert [(lane.holders, lane.takers, lane.num_bytes) for lane in found] == [
        ((0,), (2, 3), 24),
        ((1,), (2, 3), 8),
    ]
    assert [p.hf_name for p in found[0].pieces] == ["a", "b"]


def test_a_region_larger_than_a_bucket_is_cut_by_rows():
    buckets = list(fill(lane_of(piece("w", 10)), 12))
    spans = [(p.rect.start[0], p.rect.stop[0]) for bucket in buckets for p in bucket]
    assert spans == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_a_lane_of_replicas_has_a_bucket_for_each_of_them_if_that_is_worth_it():
    large = piece("w", 8, row_bytes=SMALL_BUCKET_BYTES)
    assert len(list(fill(lane_of(large, holders=(0, 1, 2, 3)), 2**40))) == 4
    assert len(list(fill(lane_of(piece("w", 8), holders=(0, 1, 2, 3)), 2**40))) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 100))
def test_buckets_hold_every_row_once_and_keep_to_their_size(counts, bucket_bytes):
    pieces = [piece(f"w{i}", count) for i, count in enumerate(counts)]
    buckets = list(fill(lane_of(*pieces), bucket_bytes))
    assert all(sum(p.num_bytes for p in bucket) <= max(bucket_bytes, 4) for bucket in buckets)
    shards = [
        ShardLayout("s", (), (LayoutBlock(p.hf_name, p.rect, p.rect),))
        for bucket in buckets
        for p in bucket
    ]
    check_cover({p.hf_name: p.rect.stop for p in pieces}, shards, owner="test")


@pytest.mark.parametrize(("takers", "expected"), [((2, 3), 10), ((0, 1), 0), ((2, 4), 20)])
def test_a_machine_that_holds_nothing_is_entered_once(takers, expected):
    nodes = [Location(node) for node in (0, 0, 1, 1, 2)]
    assert least_network_bytes([Lane((0, 1), takers, 10)], nodes) == expected

"""Ways by hand: who copies, who enters a machine, who forwards; and the order of buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block as LayoutBlock
from mega_agentrl.reshard.layout import Rect, ShardLayout, check_cover
from mega_agentrl.reshard.planner.broadcast_tree import (
    MIN_BUCKET_BYTES,
    BucketScheduler,
    TransferGroup,
    build_broadcast_tree,
    group_regions,
    make_pending_buckets,
    min_network_bytes,
    split_into_buckets,
)
from mega_agentrl.reshard.planner.regions import TransferRegion
from mega_agentrl.reshard.planner.transfer_plan import Hop, TensorSlice
from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation


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


BYTES = 100


def group(holders, receivers, name="w", num_bytes=BYTES):
    return TransferGroup(
        holders, receivers, num_bytes, [TensorSlice(name, Rect((0,), (num_bytes,)), num_bytes)]
    )


def dispatch(groups, locations, bucket_bytes=BYTES):
    pending_buckets = make_pending_buckets(groups, locations, bucket_bytes)
    return BucketScheduler(locations, LinkSpeeds()).schedule(pending_buckets)


def hops_of(groups, locations):
    return [tuple(map(tuple, bucket.hops)) for bucket in dispatch(groups, locations)]


def test_receivers_on_a_holders_device_copy_and_the_others_get_it_from_them():
    locations = [
        RankLocation(0, 0),
        RankLocation(0, 1),
        RankLocation(0, 0),
        RankLocation(0, 1),
        RankLocation(0, 2),
    ]
    ((*copies, last),) = hops_of([group((0, 1), (2, 3, 4))], locations)
    assert copies == [(0, 2), (1, 3)]
    assert last in {(2, 4), (3, 4)}


def test_of_two_replicas_on_a_device_the_first_serves():
    locations = [RankLocation(0, 0), RankLocation(0, 0), RankLocation(0, 0)]
    assert build_broadcast_tree(group((0, 1), (2,)), locations).nodes_with_holder[
        0
    ].same_gpu_pairs == ((0, 2),)


def test_a_holder_on_the_machine_is_preferred_to_one_that_has_sent_less():
    locations = [RankLocation(0, 0), RankLocation(1, 0), RankLocation(1, 1)]
    assert hops_of([group((0, 1), (2,)), group((0, 1), (2,), "v")], locations) == [((1, 2),)] * 2


def test_of_equally_near_holders_the_one_that_has_sent_least_starts():
    locations = [RankLocation(0), RankLocation(1), RankLocation(2), RankLocation(3)]
    groups = [group((0, 1), (3,), f"w{i}") for i in range(4)] + [group((2,), (3,), "x")]
    trainer_layouts = [hop.source for bucket in dispatch(groups, locations) for hop in bucket.hops]
    assert sorted(trainer_layouts) == [0, 0, 1, 1, 2]


def test_a_copy_on_a_device_does_not_count_as_sending():
    locations = [RankLocation(0, 0), RankLocation(1, 0), RankLocation(0, 0), RankLocation(2, 0)]
    groups = [group((0, 1), (2,)), group((0, 1), (3,), "v"), group((0, 1), (3,), "u")]
    assert sorted(hops_of(groups, locations)) == [((0, 2),), ((0, 3),), ((1, 3),)]
    assert sorted(hops_of(groups[:2], locations)) == [((0, 2),), ((0, 3),)]


def test_machines_without_a_holder_are_a_chain_that_is_entered_once_each():
    # trainer on machine 0; receivers on machines 1, 1, 2, 2, 3
    locations = [
        RankLocation(0),
        *(RankLocation(node, n) for n, node in enumerate((1, 1, 2, 2, 3))),
    ]
    (hops,) = hops_of([group((0,), (1, 2, 3, 4, 5))], locations)
    assert hops[:2] == ((0, 1), (1, 2))
    assert [target for _, target in hops] == [1, 2, 3, 4, 5]
    assert hops[2][0] in {1, 2}
    assert hops[4][0] in {3, 4}


def test_the_trainer_sends_nothing_over_the_network_once_a_receiver_has_copied():
    locations = [RankLocation(0, 0), RankLocation(0, 0), RankLocation(1, 0)]
    assert hops_of([group((0,), (1, 2))], locations) == [((0, 1), (1, 2))]


def test_entries_take_turns_so_that_all_network_ports_of_a_machine_are_used():
    locations = [RankLocation(0), *(RankLocation(1, n) for n in range(4))]
    buckets = dispatch([group((0,), (1, 2, 3, 4), num_bytes=8 * BYTES)], locations)
    entries = [bucket.hops[0].target for bucket in buckets]
    assert sorted(entries) == [1, 1, 2, 2, 3, 3, 4, 4]
    passed_on = [hop.source for bucket in buckets for hop in bucket.hops[1:]]
    assert max(map(passed_on.count, (1, 2, 3, 4))) <= 8


def test_trainer_ranks_do_not_queue_in_front_of_one_receiver():
    locations = [RankLocation(node) for node in range(6)]
    groups = [group((s,), (t,), f"{s}{t}") for t in (3, 4, 5) for s in (0, 1, 2)]
    hops = [bucket.hops[0] for bucket in dispatch(groups, locations)]
    for start in (0, 3, 6):
        together = hops[start : start + 3]
        assert len({hop.source for hop in together}) == len({hop.target for hop in together}) == 3


def test_buckets_are_numbered_in_order_and_nothing_is_lost():
    locations = [RankLocation(0), RankLocation(1)]
    buckets = dispatch([group((0,), (1,), num_bytes=950)], locations)
    assert [bucket.index for bucket in buckets] == list(range(10))
    assert sum(bucket.num_bytes for bucket in buckets) == 950
    assert all(bucket.hops == (Hop(0, 1),) for bucket in buckets)

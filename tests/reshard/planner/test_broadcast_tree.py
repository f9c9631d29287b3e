"""Hops by hand: who copies, who enters a machine, who forwards; and the order of buckets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, check_cover
from mega_agentrl.reshard.planner.broadcast_tree import (
    MIN_BUCKET_BYTES,
    BucketScheduler,
    TransferGroup,
    build_broadcast_tree,
    group_regions,
    make_pending_buckets,
    split_into_buckets,
)
from mega_agentrl.reshard.planner.regions import TransferRegion
from mega_agentrl.reshard.planner.transfer_plan import Hop, TensorSlice
from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation


def tensor_slice(name, num_rows, row_bytes=4):
    return TensorSlice(name, Rect.whole((num_rows, row_bytes // 4)), num_rows * row_bytes)


def buckets_of(*slices, holders=(0,), bucket_bytes=2**40):
    group = TransferGroup(holders, (9,), sum(part.num_bytes for part in slices), list(slices))
    return list(split_into_buckets(group, bucket_bytes))


def test_regions_with_equal_ranks_share_a_group():
    groups = group_regions(
        [
            TransferRegion("a", Rect((0,), (2,)), (0,), (2, 3)),
            TransferRegion("a", Rect((2,), (4,)), (1,), (2, 3)),
            TransferRegion("b", Rect((0,), (8,)), (0,), (2, 3)),
        ],
        {"a": 4, "b": 2},
    )
    found = [(g.holders, g.receivers, g.num_bytes, [s.hf_name for s in g.slices]) for g in groups]
    assert found == [((0,), (2, 3), 24, ["a", "b"]), ((1,), (2, 3), 8, ["a"])]


def test_a_region_larger_than_a_bucket_is_split_by_rows():
    buckets = buckets_of(tensor_slice("w", 10), bucket_bytes=12)
    spans = [(part.rect.start[0], part.rect.stop[0]) for bucket in buckets for part in bucket]
    assert spans == [(0, 3), (3, 6), (6, 9), (9, 10)]


@pytest.mark.parametrize(
    ("row_bytes", "num_buckets"), [(MIN_BUCKET_BYTES, 4), (4, 1)], ids=["large", "small"]
)
def test_a_large_group_has_a_bucket_for_each_replica(row_bytes, num_buckets):
    assert len(buckets_of(tensor_slice("w", 8, row_bytes), holders=(0, 1, 2, 3))) == num_buckets


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 100))
def test_buckets_hold_every_row_once_and_keep_to_their_size(counts, bucket_bytes):
    slices = [tensor_slice(f"w{i}", count) for i, count in enumerate(counts)]
    buckets = buckets_of(*slices, bucket_bytes=bucket_bytes)
    assert all(sum(p.num_bytes for p in bucket) <= max(bucket_bytes, 4) for bucket in buckets)
    shards = [
        ShardLayout("s", (), (Block(part.hf_name, part.rect, part.rect),))
        for part in itertools.chain(*buckets)
    ]
    check_cover({part.hf_name: part.rect.stop for part in slices}, shards, owner="test")


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


def locations_of(*places):
    """Locations by node, or by (node, device)."""
    return [RankLocation(*((place,) if isinstance(place, int) else place)) for place in places]


W_TO_2, V_TO_3, U_TO_3 = group((0, 1), (2,)), group((0, 1), (3,), "v"), group((0, 1), (3,), "u")


@pytest.mark.parametrize(
    ("places", "groups", "hops"),
    [
        # The holder on the machine serves both buckets, though it has sent more.
        (((0, 0), (1, 0), (1, 1)), [W_TO_2, group((0, 1), (2,), "v")], [((1, 2),)] * 2),
        # A copy on a device does not count as sending.
        (((0, 0), (1, 0), (0, 0), (2, 0)), [W_TO_2, V_TO_3], [((0, 2),), ((0, 3),)]),
        (
            ((0, 0), (1, 0), (0, 0), (2, 0)),
            [W_TO_2, V_TO_3, U_TO_3],
            [((0, 2),), ((0, 3),), ((1, 3),)],
        ),
        # Once a receiver has copied, the trainer sends nothing over the network.
        (((0, 0), (0, 0), (1, 0)), [group((0,), (1, 2))], [((0, 1), (1, 2))]),
    ],
    ids=["near-holder", "copy", "copy-and-two-sends", "forwarded-copy"],
)
def test_hops_by_hand(places, groups, hops):
    assert sorted(hops_of(groups, locations_of(*places))) == hops


def test_receivers_on_a_holders_device_copy_and_forward_to_the_others():
    locations = locations_of((0, 0), (0, 1), (0, 0), (0, 1), (0, 2))
    ((*copies, last),) = hops_of([group((0, 1), (2, 3, 4))], locations)
    assert copies == [(0, 2), (1, 3)]
    assert last in {(2, 4), (3, 4)}


def test_of_two_replicas_on_a_device_the_first_serves():
    tree = build_broadcast_tree(W_TO_2, locations_of((0, 0), (0, 0), (0, 0)))
    assert tree.nodes_with_holder[0].same_gpu_pairs == ((0, 2),)


def test_of_equally_near_holders_the_one_that_has_sent_least_starts():
    groups = [group((0, 1), (3,), f"w{i}") for i in range(4)] + [group((2,), (3,), "x")]
    buckets = dispatch(groups, locations_of(0, 1, 2, 3))
    assert sorted(hop.source for bucket in buckets for hop in bucket.hops) == [0, 0, 1, 1, 2]


def test_machines_without_a_holder_are_a_chain_that_is_entered_once_each():
    # The trainer is on machine 0, receivers on machines 1, 1, 2, 2 and 3.
    locations = locations_of(0, (1, 0), (1, 1), (2, 2), (2, 3), (3, 4))
    (hops,) = hops_of([group((0,), (1, 2, 3, 4, 5))], locations)
    assert hops[:2] == ((0, 1), (1, 2))
    assert [target for _, target in hops] == [1, 2, 3, 4, 5]
    assert hops[2][0] in {1, 2}
    assert hops[4][0] in {3, 4}


def test_first_receivers_take_turns_so_that_all_network_ports_of_a_machine_are_used():
    locations = locations_of(0, *((1, n) for n in range(4)))
    buckets = dispatch([group((0,), (1, 2, 3, 4), num_bytes=8 * BYTES)], locations)
    first_receivers = [bucket.hops[0].target for bucket in buckets]
    assert sorted(first_receivers) == [1, 1, 2, 2, 3, 3, 4, 4]
    forwarders = [hop.source for bucket in buckets for hop in bucket.hops[1:]]
    assert max(map(forwarders.count, (1, 2, 3, 4))) <= 8


def test_trainer_ranks_do_not_queue_for_one_receiver():
    groups = [group((s,), (t,), f"{s}{t}") for t in (3, 4, 5) for s in (0, 1, 2)]
    hops = [bucket.hops[0] for bucket in dispatch(groups, locations_of(*range(6)))]
    for start in (0, 3, 6):
        together = hops[start : start + 3]
        assert len({hop.source for hop in together}) == len({hop.target for hop in together}) == 3


def test_buckets_are_numbered_in_order_and_nothing_is_lost():
    buckets = dispatch([group((0,), (1,), num_bytes=950)], locations_of(0, 1))
    assert [bucket.index for bucket in buckets] == list(range(10))
    assert sum(bucket.num_bytes for bucket in buckets) == 950
    assert all(bucket.hops == (Hop(0, 1),) for bucket in buckets)

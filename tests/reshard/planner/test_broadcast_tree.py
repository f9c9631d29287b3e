"""Hops by hand: who copies, sends and forwards, how many peers that makes; order of buckets."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, check_cover
from mega_agentrl.reshard.planner.broadcast_tree import (
    MAX_SENDERS_PER_RANK,
    MIN_BUCKET_BYTES,
    BroadcastPlanner,
    build_broadcast_tree,
)
from mega_agentrl.reshard.planner.regions import TransferRegion
from mega_agentrl.reshard.planner.transfer_groups import (
    TransferGroup,
    group_regions,
    merge_units,
    split_into_buckets,
    transfer_unit,
)
from mega_agentrl.reshard.planner.transfer_plan import Hop, TensorSlice
from mega_agentrl.reshard.topology import RankLocation


def tensor_slice(name, num_rows, row_bytes=4):
    return TensorSlice(name, Rect.whole((num_rows, row_bytes // 4)), num_rows * row_bytes)


def buckets_of(*slices, bucket_bytes):
    group = TransferGroup("u", (0,), (9,), sum(part.num_bytes for part in slices), list(slices))
    return list(split_into_buckets(group, bucket_bytes))


def test_a_layer_is_a_unit_and_so_is_a_tensor_outside_of_the_layers():
    names = ("model.layers.12.mlp.experts.3.up_proj.weight", "model.layers.12.norm", "lm_head")
    units = [transfer_unit(name) for name in names]
    assert units == ["model.layers.12.", "model.layers.12.", "lm_head"]


def test_regions_of_a_unit_with_equal_ranks_share_a_group():
    a, b, c = "model.layers.0.a", "model.layers.0.b", "model.layers.1.a"
    groups = group_regions(
        [
            TransferRegion(a, Rect((0,), (2,)), (0,), (2, 3)),
            TransferRegion(a, Rect((2,), (4,)), (1,), (2, 3)),
            TransferRegion(b, Rect((0,), (8,)), (0,), (2, 3)),
            TransferRegion(c, Rect((0,), (2,)), (0,), (2, 3)),
        ],
        {a: 4, b: 2, c: 4},
    )
    found = [(g.holders, g.receivers, g.num_bytes, [s.hf_name for s in g.slices]) for g in groups]
    assert found == [((0,), (2, 3), 24, [a, b]), ((1,), (2, 3), 8, [a]), ((0,), (2, 3), 8, [c])]


def test_a_region_larger_than_a_bucket_is_split_by_rows():
    buckets = buckets_of(tensor_slice("w", 10), bucket_bytes=12)
    spans = [(part.rect.start[0], part.rect.stop[0]) for bucket in buckets for part in bucket]
    assert spans == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_senders_get_equal_shares_of_slices_that_do_not_divide_into_them():
    slices = [tensor_slice("w", 3), tensor_slice("v", 5)]
    (one, other) = split_into_buckets(TransferGroup("u", (0, 1), (9,), 32, slices), 32, 2)
    assert [(part.hf_name, part.rect.shape[0]) for part in one] == [("w", 3), ("v", 1)]
    assert [(part.hf_name, part.rect.shape[0]) for part in other] == [("v", 4)]
    # Three buckets of at most 12 bytes would do; two senders make it four.
    assert len(split_into_buckets(TransferGroup("u", (0, 1), (9,), 32, slices), 12, 2)) == 4


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


def group(holders, receivers, name="w", num_bytes=BYTES, unit="u"):
    slices = [TensorSlice(name, Rect((0,), (num_bytes,)), num_bytes)]
    return TransferGroup(unit, holders, receivers, num_bytes, slices)


def plan(groups, locations, bucket_bytes=2**40):
    return BroadcastPlanner(groups, locations, bucket_bytes).make_buckets()


def hops_of(groups, locations, bucket_bytes=2**40):
    return [tuple(map(tuple, bucket.hops)) for bucket in plan(groups, locations, bucket_bytes)]


def locations_of(*places):
    """Locations by node, or by (node, device)."""
    return [RankLocation(*((place,) if isinstance(place, int) else place)) for place in places]


W_TO_2 = group((0, 1), (2,))


@pytest.mark.parametrize(
    ("places", "groups", "hops"),
    [
        # The holder on the machine serves both buckets.
        (((0, 0), (1, 0), (1, 1)), [W_TO_2, group((0, 1), (2,), unit="v")], [((1, 2),)] * 2),
        (((0, 0), (1, 0), (0, 0), (2, 0)), [W_TO_2], [((0, 2),)]),
        # Once a receiver has copied, the trainer sends nothing over the network.
        (((0, 0), (0, 0), (1, 0)), [group((0,), (1, 2))], [((0, 1), (1, 2))]),
    ],
    ids=["near-holder", "copy", "forwarded-copy"],
)
def test_hops_come_from_the_nearest_rank_that_holds_the_slices(places, groups, hops):
    assert sorted(hops_of(groups, locations_of(*places), BYTES)) == hops


def test_receivers_on_a_holders_device_copy_and_forward_to_the_others():
    locations = locations_of((0, 0), (0, 1), (0, 0), (0, 1), (0, 2))
    ((*copies, last),) = hops_of([group((0, 1), (2, 3, 4))], locations)
    assert copies == [(0, 2), (1, 3)]
    assert last in {(2, 4), (3, 4)}


def test_of_two_replicas_on_a_device_the_first_serves():
    tree = build_broadcast_tree((0, 1), (2,), locations_of((0, 0), (0, 0), (0, 0)))
    assert tree.nodes_with_holder[0].same_gpu_pairs == ((0, 2),)


def test_machines_without_a_holder_are_a_chain_that_is_entered_once_each():
    # The trainer is on machine 0, receivers on machines 1, 1, 2, 2 and 3.
    locations = locations_of(0, (1, 0), (1, 1), (2, 2), (2, 3), (3, 4))
    (hops,) = hops_of([group((0,), (1, 2, 3, 4, 5))], locations)
    assert hops == ((0, 1), (1, 2), (1, 3), (3, 4), (3, 5))


LARGE = 2 * MIN_BUCKET_BYTES


def test_replicas_share_a_large_group_between_the_network_ports_of_a_machine():
    # Two replicas, one machine with receivers 2 and 3.
    locations = locations_of(0, 0, (1, 0), (1, 1))
    large = hops_of([group((0, 1), (2, 3), num_bytes=LARGE)], locations, MIN_BUCKET_BYTES)
    assert large == [((0, 2), (2, 3)), ((1, 3), (3, 2))]
    assert len(hops_of([group((0, 1), (2, 3))], locations)) == 1


def test_a_receiver_gets_slices_from_few_ranks_unless_that_would_delay_it():
    locations = locations_of(*range(6))
    groups = [
        group((0,), (4,), num_bytes=LARGE),
        group((1, 2), (4,), num_bytes=LARGE),  # a replica starts to send
        group((0, 3), (4,), num_bytes=LARGE),  # rank 0 has time: rank 4 receives three groups
        group((1, 2), (5,), num_bytes=LARGE),  # another receiver: the replicas share the work
    ]
    sources = sorted(hops[0] for hops in hops_of(groups, locations))
    assert sources == [(0, 4), (0, 4), (1, 4), (2, 5)]
    alone = [group((0, 1), (rank,), num_bytes=LARGE) for rank in (4, 5)]
    assert sorted(hops[0] for hops in hops_of(alone, locations)) == [(0, 4), (1, 5)]


def peers_of(buckets):
    hops = {hop for bucket in buckets for hop in bucket.hops}
    return Counter(rank for hop in hops for rank in hop)


def test_more_senders_enter_at_more_machines_so_that_peers_are_bounded():
    # Every trainer rank holds a slice that one receiver on each of eight machines needs.
    num = 4 * MAX_SENDERS_PER_RANK
    receivers = tuple(range(num, num + 8))
    locations = locations_of(*([0] * num), *range(1, 9))
    groups = [group((rank,), receivers, f"w{rank}") for rank in range(num)]
    buckets = plan(groups, locations)
    assert max(peers_of(buckets).values()) <= MAX_SENDERS_PER_RANK + 8
    for bucket in buckets:
        assert sorted(hop.target for hop in bucket.hops) == list(receivers)
    heads = [bucket.hops[0].target for bucket in buckets]
    assert [head for head, _ in itertools.groupby(heads)] == list(receivers[:4])


def test_the_heads_of_a_unit_come_first_in_its_chains():
    num = 2 * MAX_SENDERS_PER_RANK
    locations = locations_of(*([0] * num), 1, 2, 3)
    groups = [group((rank,), (num, num + 1, num + 2), f"w{rank}") for rank in range(num)]
    chains = {tuple(hop.target - num for hop in b.hops) for b in plan(groups, locations)}
    assert chains == {(0, 1, 2), (1, 0, 2)}


def test_units_are_sent_one_after_the_other():
    groups = [
        group((source,), (target,), f"{unit}{source}{target}", unit=unit)
        for unit in "abc"
        for source in (0, 1)
        for target in (2, 3)
    ]
    buckets = plan(groups, locations_of(*range(4)), 2 * BYTES)
    assert [bucket.slices[0].hf_name[0] for bucket in buckets] == [*"aaaabbbbcccc"]


@pytest.mark.parametrize(
    ("max_bytes", "units"),
    [(BYTES, ["a", "b", "cc"]), (2 * BYTES, ["ab", "cc"]), (4 * BYTES, ["abcc"])],
    ids=["none", "two", "all"],
)
def test_units_are_merged_while_every_rank_gets_no_more_than_a_bucket(max_bytes, units):
    groups = [
        group((0,), (2, 3), "a", unit="a"),
        group((0,), (2, 3), "b", unit="b"),
        group((0,), (2,), "c", unit="c"),
        group((0,), (2, 3), "c", unit="c"),
    ]
    merged = merge_units(groups, max_bytes)
    names = [
        "".join(sorted(part.hf_name for group in unit for part in group.slices)) for unit in merged
    ]
    assert names == units
    assert all(g.num_bytes == sum(s.num_bytes for s in g.slices) for unit in merged for g in unit)
    assert len({(g.holders, g.receivers) for g in merged[0]}) == len(merged[0])


def test_receivers_do_not_all_wait_for_the_same_sender():
    groups = [group((s,), (t,), f"{s}{t}") for t in (3, 4, 5) for s in (0, 1, 2)]
    hops = [bucket.hops[0] for bucket in plan(groups, locations_of(*range(6)))]
    for start in (0, 3, 6):
        together = hops[start : start + 3]
        assert len({hop.source for hop in together}) == len({hop.target for hop in together}) == 3


def test_buckets_are_numbered_in_order_and_nothing_is_lost():
    buckets = plan([group((0,), (1,), num_bytes=950)], locations_of(0, 1), bucket_bytes=100)
    assert [bucket.index for bucket in buckets] == list(range(10))
    assert sum(bucket.num_bytes for bucket in buckets) == 950
    assert all(bucket.hops == (Hop(0, 1),) for bucket in buckets)

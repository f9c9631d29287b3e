"""Ways by hand: who copies, who enters a machine, who forwards; and the order of buckets."""

from __future__ import annotations

from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.planner.broadcast_tree import (
    BucketScheduler,
    build_broadcast_tree,
    make_pending_buckets,
)
from mega_agentrl.reshard.planner.transfer_groups import TransferGroup
from mega_agentrl.reshard.planner.transfer_plan import Hop, TensorSlice
from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation

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

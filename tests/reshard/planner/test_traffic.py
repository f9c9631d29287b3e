"""Bytes and predicted seconds of small plans, by hand."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.traffic import count_traffic, max_open_bytes, module_bytes
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TensorSlice, TransferPlan
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation

SPEEDS = LinkSpeeds(same_gpu=100.0, same_node=10.0, network=1.0)
# One trainer rank; three rollout ranks: on its device, on its machine, elsewhere.
LOCATIONS = [RankLocation(0, 0), RankLocation(0, 0), RankLocation(0, 1), RankLocation(1, 0)]


def plan(*buckets):
    return TransferPlan(
        1, 3, {}, tuple(Bucket(i, n, (), hops) for i, (n, hops) in enumerate(buckets)), 10
    )


def test_bytes_are_counted_by_link_type_and_rank():
    traffic = count_traffic(
        plan((10, (Hop(0, 1), Hop(1, 2), Hop(2, 3))), (5, (Hop(0, 2),))), LOCATIONS, SPEEDS
    )
    assert traffic.sent_bytes[LinkType.same_gpu] == [10, 0, 0, 0]
    assert traffic.sent_bytes[LinkType.same_node] == [5, 10, 0, 0]
    assert traffic.received_bytes[LinkType.network] == [0, 0, 0, 10]
    assert [traffic.received_bytes_of(rank) for rank in range(4)] == [0, 10, 15, 10]
    assert traffic.total_bytes(LinkType.same_node) == 15
    assert traffic.trainer_sent_bytes() == 5


def test_a_chain_takes_the_sum_and_a_second_bucket_follows_at_once():
    chain = (Hop(0, 1), Hop(1, 2), Hop(2, 3))
    for num_buckets, seconds in ((1, 11.1), (2, 21.1)):
        traffic = count_traffic(plan(*[(10, chain)] * num_buckets), LOCATIONS, SPEEDS)
        assert traffic.predicted_s == pytest.approx(seconds)


def test_a_port_carries_one_transfer_at_a_time_and_links_do_not_delay_each_other():
    # Both senders need the network port of rank 3; then rank 2 sends over two links at once.
    one_port = plan((5, (Hop(0, 3),)), (5, (Hop(0, 2), Hop(2, 3))))
    assert count_traffic(one_port, LOCATIONS, SPEEDS).predicted_s == 10.0
    two_links = plan((5, (Hop(0, 2), Hop(2, 1), Hop(2, 3))))
    assert count_traffic(two_links, LOCATIONS, SPEEDS).predicted_s == 5.5


def test_a_peer_counts_once_for_each_direction():
    traffic = count_traffic(
        plan((1, (Hop(0, 1), Hop(1, 2))), (1, (Hop(0, 1), Hop(1, 2))), (1, (Hop(0, 2), Hop(2, 1)))),
        LOCATIONS,
        SPEEDS,
    )
    assert traffic.num_peers == [2, 3, 3, 0]
    assert traffic.max_peers() == 3


def test_a_module_is_open_from_its_first_slice_to_its_last():
    layout = [
        ShardLayout(name, (2,), (Block(name, rows(0, 2), rows(0, 2)),))
        for name in ("a.weight", "a.bias", "b.weight")
    ]
    assert module_bytes(layout, 4) == {"a": 16, "b": 8}
    a, bias, b = (TensorSlice(shard.name, rows(0, 2), 8) for shard in layout)
    for slices, num_bytes in (((a, bias, b), 16), ((a, b, bias), 24), ((b, a, bias), 16)):
        buckets = [Bucket(i, 8, (part,), (Hop(0, 1),)) for i, part in enumerate(slices)]
        elsewhere = Bucket(3, 8, (b,), (Hop(0, 2),))
        names = dict.fromkeys((shard.name for shard in layout), "float32")
        made = TransferPlan(1, 2, names, (elsewhere, *buckets))
        assert max_open_bytes(made, 1, layout) == num_bytes


def rows(start, stop):
    return Rect((start,), (stop,))


def test_the_summary_has_a_line_for_each_link_type_bound_time_and_peers():
    text = count_traffic(plan((10, (Hop(0, 3),))), LOCATIONS, SPEEDS).summary()
    first_words = [line.split()[0] for line in text.splitlines()]
    assert first_words == [*LinkType, "at", "predicted", "peers"]

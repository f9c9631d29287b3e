"""Bytes and predicted seconds of small plans, by hand."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.planner.traffic import LinkSimulator, count_traffic
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TransferPlan
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation

SPEEDS = LinkSpeeds(same_gpu=100.0, same_node=10.0, network=1.0)
# One trainer rank; three rollout ranks: on its device, on its machine, elsewhere.
LOCATIONS = [RankLocation(0, 0), RankLocation(0, 0), RankLocation(0, 1), RankLocation(1, 0)]
TWO_BY_TWO = [RankLocation(0, 0), RankLocation(0, 1), RankLocation(1, 0), RankLocation(1, 1)]


def test_one_port_carries_one_transfer_at_a_time():
    simulator = LinkSimulator(TWO_BY_TWO, SPEEDS)
    assert simulator.transfer(0, 2, 5, {}) == 5.0
    assert simulator.transfer(0, 3, 5, {}) == 10.0  # rank 0 is still sending
    assert simulator.transfer(1, 2, 5, {}) == 10.0  # rank 2 is still receiving
    assert simulator.transfer(1, 2, 5, {1: 20.0}) == 25.0  # rank 1 has the bytes later


def test_sending_receiving_and_other_links_go_on_meanwhile():
    simulator = LinkSimulator(TWO_BY_TWO, SPEEDS)
    simulator.transfer(0, 2, 5, {})
    assert simulator.transfer(2, 0, 5, {}) == 5.0
    assert simulator.transfer(0, 1, 5, {}) == 0.5


def plan(*buckets):
    return TransferPlan(
        1, 3, {}, tuple(Bucket(i, n, (), hops) for i, (n, hops) in enumerate(buckets)), 10
    )


def test_bytes_by_link_type_and_rank():
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


def test_the_summary_has_a_line_for_each_link_type_bound_and_time():
    text = count_traffic(plan((10, (Hop(0, 3),))), LOCATIONS, SPEEDS).summary()
    assert [line.split()[0] for line in text.splitlines()] == [*LinkType, "at", "predicted"]

"""Bytes and predicted seconds of small plans, by hand."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.delivery import Bucket, DeliveryPlan, Hop
from mega_agentrl.reshard.links import Link, LinkSpeeds, Location
from mega_agentrl.reshard.traffic import count_traffic

SPEEDS = LinkSpeeds(same_gpu=100.0, same_node=10.0, network=1.0)
# One trainer rank; three rollout ranks: on its device, on its machine, elsewhere.
PLACES = [Location(0, 0), Location(0, 0), Location(0, 1), Location(1, 0)]


def plan(*buckets):
    return DeliveryPlan(
        1, 3, {}, tuple(Bucket(i, n, (), hops) for i, (n, hops) in enumerate(buckets)), 10
    )


def test_bytes_by_class_and_rank():
    traffic = count_traffic(
        plan((10, (Hop(0, 1), Hop(1, 2), Hop(2, 3))), (5, (Hop(0, 2),))), PLACES, SPEEDS
    )
    assert traffic.sent[Link.same_gpu] == [10, 0, 0, 0]
    assert traffic.sent[Link.same_node] == [5, 10, 0, 0]
    assert traffic.received[Link.network] == [0, 0, 0, 10]
    assert [traffic.received_by(rank) for rank in range(4)] == [0, 10, 15, 10]
    assert traffic.total(Link.same_node) == 15
    assert traffic.sent_by_trainer() == 5


def test_a_chain_takes_the_sum_and_a_second_bucket_follows_at_once():
    chain = (Hop(0, 1), Hop(1, 2), Hop(2, 3))
    assert count_traffic(plan((10, chain)), PLACES, SPEEDS).seconds == pytest.approx(11.1)
    assert count_traffic(plan((10, chain), (10, chain)), PLACES, SPEEDS).seconds == pytest.approx(
        21.1
    )


def test_the_description_names_classes_bound_and_time():
    text = count_traffic(plan((10, (Hop(0, 3),))), PLACES, SPEEDS).describe()
    assert [line.split()[0] for line in text.splitlines()] == [*Link, "at", "predicted"]

"""Transfers wait for both ports and for the bytes; classes do not disturb each other."""

from __future__ import annotations

from mega_agentrl.reshard.planner.link_simulator import LinkSimulator
from mega_agentrl.reshard.topology import LinkSpeeds, RankLocation

SPEEDS = LinkSpeeds(same_gpu=100.0, same_node=10.0, network=1.0)
LOCATIONS = [RankLocation(0, 0), RankLocation(0, 1), RankLocation(1, 0), RankLocation(1, 1)]


def test_one_port_carries_one_transfer_at_a_time():
    simulator = LinkSimulator(LOCATIONS, SPEEDS)
    assert simulator.transfer(0, 2, 5, 0.0) == 5.0
    assert simulator.transfer(0, 3, 5, 0.0) == 10.0  # rank 0 is still sending
    assert simulator.transfer(1, 2, 5, 0.0) == 10.0  # rank 2 is still receiving
    assert simulator.transfer(1, 2, 5, 20.0) == 25.0  # rank 1 has the bytes later


def test_sending_receiving_and_other_links_go_on_meanwhile():
    simulator = LinkSimulator(LOCATIONS, SPEEDS)
    simulator.transfer(0, 2, 5, 0.0)
    assert simulator.transfer(2, 0, 5, 0.0) == 5.0
    assert simulator.transfer(0, 1, 5, 0.0) == 0.5

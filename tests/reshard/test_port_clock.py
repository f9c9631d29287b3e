"""Transfers wait for both ports and for the bytes; classes do not disturb each other."""

from __future__ import annotations

from mega_agentrl.reshard.links import LinkSpeeds, Location
from mega_agentrl.reshard.port_clock import PortClock

SPEEDS = LinkSpeeds(same_gpu=100.0, same_node=10.0, network=1.0)
LOCATIONS = [Location(0, 0), Location(0, 1), Location(1, 0), Location(1, 1)]


def test_one_port_carries_one_transfer_at_a_time():
    clock = PortClock(LOCATIONS, SPEEDS)
    assert clock.transfer(0, 2, 5, 0.0) == 5.0
    assert clock.transfer(0, 3, 5, 0.0) == 10.0  # rank 0 is still sending
    assert clock.transfer(1, 2, 5, 0.0) == 10.0  # rank 2 is still receiving
    assert clock.transfer(1, 2, 5, 20.0) == 25.0  # rank 1 has the bytes later


def test_sending_receiving_and_other_links_go_on_meanwhile():
    clock = PortClock(LOCATIONS, SPEEDS)
    clock.transfer(0, 2, 5, 0.0)
    assert clock.transfer(2, 0, 5, 0.0) == 5.0
    assert clock.transfer(0, 1, 5, 0.0) == 0.5

"""Classes of links and their speeds."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.links import Link, LinkSpeeds, Location, link_between


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        (Location(0, 1), Location(0, 1), Link.same_gpu),
        (Location(0, 1), Location(0, 2), Link.same_node),
        (Location(0, 1), Location(1, 1), Link.network),
        (Location(0), Location(0), Link.same_node),  # processes on a CPU share no device
    ],
)
def test_the_nearest_thing_that_two_ranks_share(one, other, link):
    assert link_between(one, other) is link_between(other, one) is link


def test_seconds_by_hand():
    speeds = LinkSpeeds(same_gpu=8.0, same_node=4.0, network=0.5)
    assert [speeds.seconds(link, 8) for link in Link] == [1.0, 2.0, 16.0]


def test_a_link_without_speed_is_refused():
    with pytest.raises(ValueError, match="network=0"):
        LinkSpeeds(network=0)

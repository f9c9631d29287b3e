"""Classes of links and their speeds."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation, link_type_between


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        (RankLocation(0, 1), RankLocation(0, 1), LinkType.same_gpu),
        (RankLocation(0, 1), RankLocation(0, 2), LinkType.same_node),
        (RankLocation(0, 1), RankLocation(1, 1), LinkType.network),
        (
            RankLocation(0),
            RankLocation(0),
            LinkType.same_node,
        ),  # processes on a CPU share no device
    ],
)
def test_the_nearest_thing_that_two_ranks_share(one, other, link):
    assert link_type_between(one, other) is link_type_between(other, one) is link


def test_seconds_by_hand():
    speeds = LinkSpeeds(same_gpu=8.0, same_node=4.0, network=0.5)
    assert [speeds.transfer_s(link, 8) for link in LinkType] == [1.0, 2.0, 16.0]


def test_a_link_without_speed_is_refused():
    with pytest.raises(ValueError, match="network=0"):
        LinkSpeeds(network=0)

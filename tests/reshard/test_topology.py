"""Where this process is, machines and devices by number, and the links that follow."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.device_location import (
    DeviceLocation,
    current_device_location,
    rank_locations,
)
from mega_agentrl.reshard.topology import LinkSpeeds, LinkType, RankLocation, link_type_between
from tests.parallel.pool import fork_server


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        (RankLocation(0, 1), RankLocation(0, 1), LinkType.same_gpu),
        (RankLocation(0, 1), RankLocation(0, 2), LinkType.same_node),
        (RankLocation(0, 1), RankLocation(1, 1), LinkType.network),
        (RankLocation(0), RankLocation(0), LinkType.same_node),
    ],
    ids=["same-gpu", "same-node", "network", "no-gpu"],
)
def test_the_link_is_the_nearest_thing_that_two_ranks_share(one, other, link):
    assert link_type_between(one, other) is link_type_between(other, one) is link


def test_a_link_without_speed_is_refused():
    with pytest.raises(InputError) as caught:
        LinkSpeeds(network=0)
    assert (caught.value.name, caught.value.got) == ("network", 0)


def test_machines_and_devices_are_numbered_by_first_appearance():
    ranks = [
        DeviceLocation("west", "gpu-a"),
        DeviceLocation("east", "gpu-b"),
        DeviceLocation("west", "gpu-c"),
        DeviceLocation("east", "gpu-b"),
        DeviceLocation("north"),
    ]
    numbers = [(0, 0), (1, 1), (0, 2), (1, 1), (2, None)]
    assert rank_locations(ranks) == [RankLocation(*pair) for pair in numbers]


def test_processes_of_this_machine_find_each_other():
    with fork_server().Pool(1) as pool:
        other = pool.apply(current_device_location)
    assert other == current_device_location()
    assert other.host_id
    assert (other.gpu_uuid is None) == (not torch.cuda.is_available())

"""Where this process is, and machines and devices by number."""

from __future__ import annotations

import torch

from mega_agentrl.reshard.device_location import (
    DeviceLocation,
    current_device_location,
    rank_locations,
)
from mega_agentrl.reshard.topology import LinkType, RankLocation, link_type_between
from tests.parallel.pool import fork_server


def test_numbers_go_by_first_appearance():
    ranks = [
        DeviceLocation("west", "gpu-a"),
        DeviceLocation("east", "gpu-b"),
        DeviceLocation("west", "gpu-c"),
        DeviceLocation("east", "gpu-b"),
        DeviceLocation("north"),
    ]
    assert rank_locations(ranks) == [
        RankLocation(0, 0),
        RankLocation(1, 1),
        RankLocation(0, 2),
        RankLocation(1, 1),
        RankLocation(2, None),
    ]
    assert rank_locations([]) == []


def test_links_that_follow():
    a, b, c, d = rank_locations(
        [
            DeviceLocation("west", "gpu-a"),
            DeviceLocation("west", "gpu-a"),
            DeviceLocation("west"),
            DeviceLocation("east"),
        ]
    )
    assert link_type_between(a, b) is LinkType.same_gpu
    assert link_type_between(a, c) is LinkType.same_node
    assert link_type_between(c, d) is LinkType.network


def test_ranks_without_a_device_share_none():
    one, two = rank_locations([DeviceLocation("west"), DeviceLocation("west")])
    assert link_type_between(one, two) is LinkType.same_node


def test_processes_of_this_machine_find_each_other():
    with fork_server().Pool(1) as pool:
        other = pool.apply(current_device_location)
    assert other == current_device_location()
    assert current_device_location().host_id
    assert (current_device_location().gpu_uuid is None) == (not torch.cuda.is_available())

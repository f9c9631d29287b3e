"""Where this process is, and machines and devices by number."""

from __future__ import annotations

import torch

from mega_agentrl.reshard.links import Link, Location, link_between
from mega_agentrl.reshard.whereabouts import Whereabouts, here, locations
from tests.parallel.fork_server import fork_server


def test_numbers_go_by_first_appearance():
    ranks = [
        Whereabouts("west", "gpu-a"),
        Whereabouts("east", "gpu-b"),
        Whereabouts("west", "gpu-c"),
        Whereabouts("east", "gpu-b"),
        Whereabouts("north"),
    ]
    assert locations(ranks) == [
        Location(0, 0),
        Location(1, 1),
        Location(0, 2),
        Location(1, 1),
        Location(2, None),
    ]
    assert locations([]) == []


def test_links_that_follow():
    a, b, c, d = locations(
        [
            Whereabouts("west", "gpu-a"),
            Whereabouts("west", "gpu-a"),
            Whereabouts("west"),
            Whereabouts("east"),
        ]
    )
    assert link_between(a, b) is Link.same_gpu
    assert link_between(a, c) is Link.same_node
    assert link_between(c, d) is Link.network


def test_ranks_without_a_device_share_none():
    one, two = locations([Whereabouts("west"), Whereabouts("west")])
    assert link_between(one, two) is Link.same_node


def test_processes_of_this_machine_find_each_other():
    with fork_server().Pool(1) as pool:
        other = pool.apply(here)
    assert other == here()
    assert here().host
    assert (here().device is None) == (not torch.cuda.is_available())

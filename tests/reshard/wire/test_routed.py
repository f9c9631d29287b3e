"""Which wire between whom, and frames that change wires on their way."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.wire.gloo import GlooWire
from mega_agentrl.reshard.wire.local import LocalHub, LocalWire
from mega_agentrl.reshard.wire.routed import Route, RoutedWire, join_wire, route_between
from tests.reshard.wire.ranks import ranks, receive, send

VALUES = [3, 1, 4, 1, 5]
GOOD = [(value, True) for value in VALUES]


@pytest.mark.parametrize(
    ("one", "other", "route"),
    [
        (Location(0), Location(0), Route.mapped),
        (Location(0), Location(1), Route.gloo),
        (Location(0, 0), Location(0, 0), Route.mapped),
        (Location(0, 0), Location(0, 1), Route.nccl),
        (Location(0, 0), Location(1, 2), Route.nccl),
        (Location(0, 0), Location(0), Route.gloo),
        (Location(0, 0), Location(1), Route.gloo),
    ],
)
def test_the_route_is_the_same_both_ways(one, other, route):
    assert route_between(one, other) is route_between(other, one) is route


class Exact(LocalWire):
    exact = True

    def receive(self, slot, peer):
        self.room = len(slot)
        return super().receive(slot, peer)


class Roomy(Exact):
    exact = False


def test_only_exact_wires_get_a_part_of_a_slot():
    hub = LocalHub(3)
    exact, roomy = Exact(hub, 0), Roomy(hub, 0)
    wire = RoutedWire({1: exact, 2: roomy}, roomy)
    assert wire.exact
    assert not RoutedWire({2: roomy}, roomy).exact
    slots = wire.slots(2, 100)
    for peer in (1, 2):
        wire.receive(slots[1][:40], peer)
    assert (exact.room, roomy.room) == (40, 100)


def test_close_closes_every_wire():
    one, two = LocalHub(2), LocalHub(2)
    RoutedWire({1: one.end(0)}, two.end(0)).close()
    assert one.closed == two.closed == {0}


def two_machines(store, rank, world_size, timeout_s):
    """Ranks 0 and 1 on one, ranks 2 and 3 on another."""
    locations = [Location(number // 2) for number in range(world_size)]
    return join_wire(store, rank, world_size, timeout_s, locations=locations)


def nowhere(store, rank, world_size, timeout_s):
    return join_wire(store, rank, world_size, timeout_s)


def kind_of(seat):
    return type(seat.wire) is GlooWire


def test_a_frame_goes_from_machine_to_machine_and_on():
    with ranks(4) as group:
        group.join(two_machines)
        group.start(0, send, VALUES, [1])  # mapped
        group.start(1, receive, 0, len(VALUES), (2,))  # gloo, from rank 0's memory
        group.start(2, receive, 1, len(VALUES), (3,))  # mapped, from its own slot
        group.start(3, receive, 2, len(VALUES))
        assert [group.finish(rank) for rank in (1, 2, 3)] == [GOOD] * 3
        group.finish(0)

        group.join(nowhere, "without-locations")
        assert all(group.ask(rank, kind_of) for rank in range(4))


def test_locations_of_other_ranks_are_an_error():
    with pytest.raises(ValueError, match="2 locations, expected 3"):
        join_wire(None, 0, 3, 1.0, locations=[Location(0)] * 2)


def with_devices(store, rank, world_size, timeout_s):
    """Two ranks on GPU 0, one on GPU 1, one on none."""
    devices = [0, 0, 1, None]
    if devices[rank] is not None:
        torch.cuda.set_device(devices[rank])
    locations = [Location(0, device) for device in devices]
    hops = [(0, 1), (1, 2), (2, 3)]
    return join_wire(store, rank, world_size, timeout_s, locations=locations, hops=hops)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_frame_goes_from_gpu_to_gpu_and_to_the_host():
    with ranks(4) as group:
        group.join(with_devices)
        group.start(0, send, VALUES, [1])  # mapped
        group.start(1, receive, 0, len(VALUES), (2,))  # NCCL
        group.start(2, receive, 1, len(VALUES), (3,))  # staged
        group.start(3, receive, 2, len(VALUES))  # gloo
        assert [group.finish(rank) for rank in (1, 2, 3)] == [GOOD] * 3
        group.finish(0)

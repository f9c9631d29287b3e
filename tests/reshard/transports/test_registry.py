"""Which transport between whom, and frames that change transports on their way."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.config.enums import TransportKind
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.transports.gloo import GlooTransport
from mega_agentrl.reshard.transports.registry import (
    TRANSPORTS,
    PerPeerTransport,
    bytes_by_transport,
    check_transport,
    join_transport,
    transport_kind_between,
)
from tests.reshard.transports.in_process import InProcessHub, InProcessTransport
from tests.reshard.transports.ranks import ranks, receive, send

VALUES = [3, 1, 4, 1, 5]
GOOD = [(value, True) for value in VALUES]


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (RankLocation(0), RankLocation(0), TransportKind.shared_memory),
        (RankLocation(0), RankLocation(1), TransportKind.gloo),
        (RankLocation(0, 0), RankLocation(0, 0), TransportKind.shared_memory),
        (RankLocation(0, 0), RankLocation(0, 1), TransportKind.nccl),
        (RankLocation(0, 0), RankLocation(1, 2), TransportKind.nccl),
        (RankLocation(0, 0), RankLocation(0), TransportKind.gloo),
        (RankLocation(0, 0), RankLocation(1), TransportKind.gloo),
    ],
)
def test_the_transport_is_the_same_in_both_directions(one, other, kind):
    assert transport_kind_between(one, other) is transport_kind_between(other, one) is kind


def test_every_kind_is_in_the_registry_and_the_last_one_connects_any_ranks():
    assert set(TRANSPORTS) == set(TransportKind) - {TransportKind.auto}
    last = list(TRANSPORTS.values())[-1]
    assert last.connects(RankLocation(0, 0), RankLocation(1))


@pytest.mark.parametrize(
    ("chosen", "one", "other", "kind"),
    [
        ("gloo", RankLocation(0, 0), RankLocation(0, 1), "gloo"),
        ("gloo", RankLocation(0), RankLocation(0), "gloo"),
        ("nccl", RankLocation(0, 0), RankLocation(1, 2), "nccl"),
        ("nccl", RankLocation(0, 0), RankLocation(0, 0), "shared_memory"),
        ("shared_memory", RankLocation(0, 0), RankLocation(0, 1), "shared_memory"),
        ("shared_memory", RankLocation(0, 0), RankLocation(1, 2), "nccl"),
        ("shared_memory", RankLocation(0), RankLocation(1), "gloo"),
    ],
    ids=[
        "gloo-gpus",
        "gloo-host",
        "nccl-gpus",
        "nccl-same-gpu",
        "memory-gpus",
        "memory-gpus-apart",
        "memory-apart",
    ],
)
def test_a_chosen_transport_is_used_where_it_connects(chosen, one, other, kind):
    assert transport_kind_between(one, other, TransportKind(chosen)) == kind
    if chosen == kind:
        check_transport(TransportKind(chosen), [one, other], [(0, 1)])
    else:
        with pytest.raises(ConfigError) as raised:
            check_transport(TransportKind(chosen), [one, other], [(0, 1)])
        assert (raised.value.key, raised.value.got) == ("weight_sync.transport", chosen)
        check_transport(TransportKind(chosen), [one, other], [])  # they exchange no weights


def test_bytes_are_counted_by_the_transport_of_each_hop():
    locations = [RankLocation(0), RankLocation(0), RankLocation(1), RankLocation(1)]
    # Rank 0 sends to its own machine and to the other one, where rank 2 forwards.
    buckets = (
        Bucket(0, 100, (), (Hop(0, 1), Hop(0, 2), Hop(2, 3))),
        Bucket(1, 7, (), (Hop(1, 3),)),
    )
    plan = SimpleNamespace(buckets=buckets)
    assert bytes_by_transport(plan, locations, TransportKind.auto) == {
        "shared_memory": 200,
        "gloo": 107,
    }
    assert bytes_by_transport(plan, locations, TransportKind.gloo) == {"gloo": 307}


def test_without_locations_only_gloo_can_be_chosen():
    check_transport(TransportKind.gloo, [], [(0, 1)])
    with pytest.raises(ConfigError):
        check_transport(TransportKind.nccl, [], [(0, 1)])


class ExactTransport(InProcessTransport):
    needs_exact_size = True

    def receive(self, slot, peer):
        self.num_slot_bytes = len(slot)
        return super().receive(slot, peer)


class RoomyTransport(ExactTransport):
    needs_exact_size = False


def test_only_exact_transports_get_a_part_of_a_slot():
    hub = InProcessHub(3)
    exact, roomy = ExactTransport(hub, 0), RoomyTransport(hub, 0)
    transport = PerPeerTransport({1: exact, 2: roomy}, roomy)
    assert transport.needs_exact_size
    assert not PerPeerTransport({2: roomy}, roomy).needs_exact_size
    slots = transport.allocate_slots(2, 100)
    for peer in (1, 2):
        transport.receive(slots[1][:40], peer)
    assert (exact.num_slot_bytes, roomy.num_slot_bytes) == (40, 100)


def test_close_closes_every_transport():
    one, two = InProcessHub(2), InProcessHub(2)
    PerPeerTransport({1: one.transport(0)}, two.transport(0)).close()
    assert one.closed_ranks == two.closed_ranks == {0}


HOPS = [(0, 1), (1, 2), (2, 3)]


def two_machines(store, rank, world_size, timeout_s):
    """Ranks 0 and 1 on one, ranks 2 and 3 on another."""
    locations = [RankLocation(number // 2) for number in range(world_size)]
    return join_transport(store, rank, world_size, timeout_s, hops=HOPS, locations=locations)


def without_locations(store, rank, world_size, timeout_s):
    return join_transport(store, rank, world_size, timeout_s, hops=HOPS)


def over_gloo(store, rank, world_size, timeout_s):
    options = {"locations": [RankLocation(0)] * world_size, "chosen": TransportKind.gloo}
    return join_transport(store, rank, world_size, timeout_s, hops=HOPS, **options)


def is_gloo(rank_state):
    return type(rank_state.transport) is GlooTransport


def test_a_frame_goes_from_machine_to_machine_and_on():
    with ranks(4) as group:
        group.join(two_machines)
        group.start(0, send, VALUES, [1])  # shared memory
        group.start(1, receive, 0, len(VALUES), (2,))  # gloo, from rank 0's memory
        group.start(2, receive, 1, len(VALUES), (3,))  # shared memory, from its own slot
        group.start(3, receive, 2, len(VALUES))
        assert [group.finish(rank) for rank in (1, 2, 3)] == [GOOD] * 3
        group.finish(0)
        for kind in (without_locations, over_gloo):
            group.join(kind, kind.__name__)
            assert all(group.ask(rank, is_gloo) for rank in range(4))


def test_locations_of_other_ranks_are_an_error():
    with pytest.raises(InputError) as caught:
        join_transport(None, 0, 3, 1.0, hops=HOPS, locations=[RankLocation(0)] * 2)
    assert (caught.value.name, caught.value.got) == ("number of locations", 2)


def with_devices(store, rank, world_size, timeout_s, chosen=TransportKind.auto):
    """Two ranks on GPU 0, one on GPU 1, one on none."""
    devices = [0, 0, 1, None]
    if devices[rank] is not None:
        torch.cuda.set_device(devices[rank])
    options = {"locations": [RankLocation(0, device) for device in devices], "chosen": chosen}
    return join_transport(store, rank, world_size, timeout_s, hops=HOPS, **options)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("chosen", [TransportKind.auto, TransportKind.shared_memory])
def test_a_frame_goes_from_gpu_to_gpu_and_to_the_host(chosen):
    with ranks(4) as group:
        group.join(partial(with_devices, chosen=chosen))
        group.start(0, send, VALUES, [1])  # shared memory
        group.start(1, receive, 0, len(VALUES), (2,))  # NCCL, or the memory of GPU 0
        group.start(2, receive, 1, len(VALUES), (3,))  # staged
        group.start(3, receive, 2, len(VALUES))  # gloo
        assert [group.finish(rank) for rank in (1, 2, 3)] == [GOOD] * 3
        group.finish(0)

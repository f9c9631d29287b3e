"""A rank's way through a plan by hand, then all ranks of real plans, as threads over gloo."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from mega_agentrl.reshard.courier import NUM_SLOTS, Courier, Leg, legs_of
from mega_agentrl.reshard.delivery import Bucket, DeliveryPlan, Hop, Piece
from mega_agentrl.reshard.frames import HEADER_BYTES, frame_bytes
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.wire.gloo import GlooWire
from tests.reshard.fake_rollout import PlainLanding
from tests.reshard.faults import cut
from tests.reshard.model_cuts import all_places, make_moe_shape, make_shape
from tests.reshard.rollout_cuts import rollout_layout
from tests.reshard.test_regions import layout, rows

DEADLINE_S = 20.0


def bucket(index, *hops):
    piece = Piece("w", Rect((index, 0), (index + 1, 4)), 16)
    return Bucket(index, 16, (piece,), tuple(Hop(*hop) for hop in hops))


def test_legs_by_hand():
    first = bucket(0, (0, 2), (2, 3), (2, 4))
    second = bucket(1, (1, 3), (1, 4))
    third = bucket(2, (0, 4), (4, 2))
    plan = DeliveryPlan(2, 3, {"w": "float32"}, (first, second, third))
    assert legs_of(plan, 0) == [Leg(first, None, (2,)), Leg(third, None, (4,))]
    assert legs_of(plan, 1) == [Leg(second, None, (3, 4))]
    assert legs_of(plan, 2) == [Leg(first, 0, (3, 4)), Leg(third, 4, ())]
    assert legs_of(plan, 3) == [Leg(first, 2, ()), Leg(second, 1, ())]
    assert legs_of(plan, 4) == [Leg(first, 2, ()), Leg(second, 1, ()), Leg(third, 0, (2,))]


class CountingWire:
    """Checks that frames lie in the slots, and counts those that are under way at a time."""

    def __init__(self, wire):
        self.wire, self.exact, self.num_calls = wire, wire.exact, 0
        self.busy, self.most = {}, 0

    def slots(self, count, num_bytes):
        self.num_calls += 1
        self.num_bytes = num_bytes
        self.given = self.wire.slots(count, num_bytes)
        return self.given

    def send(self, frame, peer):
        return self._under_way(frame, self.wire.send(frame, peer))

    def receive(self, slot, peer):
        return self._under_way(slot, self.wire.receive(slot, peer))

    def close(self):
        self.wire.close()

    def _under_way(self, frame, work):
        (slot,) = (i for i, s in enumerate(self.given) if s.data_ptr() == frame.data_ptr())
        self.busy[slot] = self.busy.get(slot, 0) + 1
        self.most = max(self.most, sum(1 for count in self.busy.values() if count))
        return Counted(self, slot, work)


class Counted:
    def __init__(self, wire, slot, work):
        self.wire, self.slot, self.work = wire, slot, work

    def wait(self, timeout_s):
        found = self.work.wait(timeout_s)
        self.wire.busy[self.slot] -= 1
        return found

    def done(self):
        self.work.done()


class Team:
    """All ranks of a plan, one thread each."""

    def __init__(self, plan, sources, sinks, timeout_s=DEADLINE_S):
        self.plan, self.sources = plan, sources
        self.landings = [PlainLanding(layout) for layout in sinks]
        self.pool = ThreadPoolExecutor(plan.world_size)
        store = HashStore()

        def join(rank):
            wire = CountingWire(GlooWire.join(store, rank, plan.world_size, timeout_s))
            return wire, Courier(plan, rank, wire, [*sources, *sinks][rank], timeout_s)

        joined = list(self.pool.map(join, range(plan.world_size)))
        self.wires, self.couriers = zip(*joined, strict=True)

    def transfer(self, tensors, version, absent=()):
        """Report, or what was raised, by rank."""
        for landing in self.landings:
            landing.clear()

        def work(rank):
            courier = self.couriers[rank]
            try:
                if rank in absent:
                    return None
                if rank < self.plan.num_sources:
                    return courier.send(cut(self.sources[rank], tensors), version)
                return courier.receive(self.landings[rank - self.plan.num_sources], version)
            except (RuntimeError, ValueError) as error:
                return error

        return list(self.pool.map(work, range(self.plan.world_size)))

    def close(self):
        for courier in self.couriers:
            courier.close()
        self.pool.shutdown()


@pytest.fixture
def team():
    made = []

    def make(*args, **options):
        made.append(Team(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("make", [make_shape, make_moe_shape])
def test_two_engines_get_ten_versions_and_pass_buckets_on(team, make):
    shape = make(num_layers=2, ffn=24)
    shapes = hf_shapes(shape)
    sources = [megatron_layout(shape, place) for place in all_places(tensor=2, pipeline=2)]
    sinks = [rollout_layout(shape, rank, 2) for rank in range(2)] * 2
    nodes = [Location(0)] * 8
    plan = plan_delivery(sources, sinks, nodes, "float32", names=list(shapes), bucket_bytes=2000)
    passing = {hop.source for b in plan.buckets for hop in b.hops if hop.source in plan.sinks}
    assert passing
    ours = team(plan, sources, sinks)
    for version in range(10):
        tensors = {name: torch.randn(size) for name, size in shapes.items()}
        reports = ours.transfer(tensors, version)
        for landing, sink in zip(ours.landings, sinks, strict=True):
            assert landing.missing == 0
            for name, expected in cut(sink, tensors).items():
                assert torch.equal(landing.params[name], expected), name
    for rank, (report, wire) in enumerate(zip(reports, ours.wires, strict=True)):
        hops = [(frame_bytes(b), hop) for b, hop in plan.hops_of(rank)]
        assert report.sent_bytes == sum(size for size, hop in hops if hop.source == rank)
        assert report.received_bytes == sum(size for size, hop in hops if hop.target == rank)
        assert report.seconds > 0
        assert len(wire.given) == NUM_SLOTS == 2
        assert wire.num_calls == 1
        assert wire.num_bytes == max([size for size, _ in hops], default=HEADER_BYTES)
        assert wire.most <= 2
    assert max(wire.most for wire in ours.wires) == 2


def small_team(team, **options):
    """Trainer ranks 0 and 1 hold half of `w` each; 2 wants all of it, 3 the second half too."""
    sources, sinks = [layout(rows(0, 4)), layout(rows(4, 8))], [layout(rows(0, 8))]
    sinks.append(layout(rows(4, 8)))
    plan = plan_delivery(sources, sinks, [Location(0)] * 4, "float32", names=["w"], bucket_bytes=16)
    return team(plan, sources, sinks, **options)


def test_sources_of_a_tensor(team):
    ours = small_team(team)
    ways = ours.couriers[2].sources_of("w")
    assert sorted(number for numbers in ways.values() for number in numbers) == list(range(8))
    assert ways.keys() <= {0, 1, 3}
    assert ours.couriers[2].sources_of("v") == {}
    assert ours.couriers[0].sources_of("w") == {}


def test_a_silent_rank_is_named_at_the_deadline(team):
    ours = small_team(team, timeout_s=1.0)
    start_s = time.monotonic()
    errors = ours.transfer({"w": torch.randn(8, 4)}, 1, absent=[0])
    assert time.monotonic() - start_s < 10
    assert isinstance(errors[2], RuntimeError)
    assert "rank 2 could not receive from rank 0 bucket" in str(errors[2])
    assert "(from w Rect(start=(" in str(errors[2])
    assert "deadline 1 s" in str(errors[2])


def test_a_rank_that_has_left_is_named_at_once(team):
    ours = small_team(team, timeout_s=60.0)
    assert not any(isinstance(r, Exception) for r in ours.transfer({"w": torch.randn(8, 4)}, 1))
    ours.couriers[1].close()
    start_s = time.monotonic()
    errors = ours.transfer({"w": torch.randn(8, 4)}, 2, absent=[1])
    assert time.monotonic() - start_s < 30
    messages = [str(error) for error in errors if isinstance(error, RuntimeError)]
    assert any("could not receive from rank 1 bucket" in message for message in messages)


def test_a_rank_that_fails_leaves_and_nobody_waits_for_it(team):
    """Rank 2 refuses the version; rank 3 waits for others than rank 2 as well."""
    ours = small_team(team, timeout_s=60.0)
    ours.couriers = (*ours.couriers[:2], Other(ours.couriers[2]), ours.couriers[3])
    start_s = time.monotonic()
    errors = ours.transfer({"w": torch.randn(8, 4)}, 7)
    assert time.monotonic() - start_s < 30
    assert sum(isinstance(error, Exception) for error in errors) > 1
    again = ours.transfer({"w": torch.randn(8, 4)}, 8)
    assert "rank 2 has left this link, expected a new one" in str(again[2])


def test_another_version_is_refused(team):
    ours = small_team(team)
    courier = ours.couriers[2]
    ours.couriers = (*ours.couriers[:2], Other(courier), ours.couriers[3])
    errors = ours.transfer({"w": torch.randn(8, 4)}, 7)
    assert isinstance(errors[2], ValueError)
    assert "rank 2 could not receive from rank" in str(errors[2])
    assert "of weight version 8" in str(errors[2])
    assert "a frame of weight version 7" in str(errors[2])


class Other:
    """A courier that expects the next version."""

    def __init__(self, courier):
        self.courier = courier

    def receive(self, landing, version):
        return self.courier.receive(landing, version + 1)

    def close(self):
        self.courier.close()


def test_a_plan_from_other_layouts_shows_before_anything_is_sent(team):
    ours = small_team(team)
    with pytest.raises(ValueError, match=r"w Rect.*lies in no block of this rank"):
        Courier(ours.plan, 0, ours.wires[0].wire, layout(rows(4, 8)), 1.0)

"""The routes of a rank by hand, then all ranks of real plans, as threads over gloo."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.executor import (
    MAX_FRAMES_PER_SLOT,
    NUM_SLOTS,
    FrameSlots,
    Route,
    TransferExecutor,
    routes_of_rank,
)
from mega_agentrl.reshard.frames import HEADER_BYTES, num_frame_bytes
from mega_agentrl.reshard.layout import Rect
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TensorSlice, TransferPlan
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.transports.gloo import GlooTransport
from tests.reshard.fake_rollout import PlainWeightWriter
from tests.reshard.faults import cut
from tests.reshard.model_cuts import make_moe_shape, make_shape, trainer_layouts_of
from tests.reshard.planner.test_regions import layout, rows
from tests.reshard.rollout_cuts import engine_layouts

DEADLINE_S = 300.0


def bucket(index, *hops):
    tensor_slice = TensorSlice("w", Rect((index, 0), (index + 1, 4)), 16)
    return Bucket(index, 16, (tensor_slice,), tuple(Hop(*hop) for hop in hops))


def test_a_route_has_the_source_and_the_targets_of_a_rank():
    first = bucket(0, (0, 2), (2, 3), (2, 4))
    second = bucket(1, (1, 3), (1, 4))
    third = bucket(2, (0, 4), (4, 2))
    plan = TransferPlan(2, 3, {"w": "float32"}, (first, second, third))
    assert routes_of_rank(plan, 0) == [Route(first, None, (2,)), Route(third, None, (4,))]
    assert routes_of_rank(plan, 1) == [Route(second, None, (3, 4))]
    assert routes_of_rank(plan, 2) == [Route(first, 0, (3, 4)), Route(third, 4, ())]
    assert routes_of_rank(plan, 3) == [Route(first, 2, ()), Route(second, 1, ())]
    assert routes_of_rank(plan, 4) == [
        Route(first, 2, ()),
        Route(second, 1, ()),
        Route(third, 0, (2,)),
    ]


def test_small_frames_share_a_slot_with_a_large_one():
    slots = FrameSlots([torch.zeros(128), torch.zeros(128)], is_shared=True)
    taken = [slots.take(num_bytes) for num_bytes in (60, 10, 60, 10)]
    assert [(index, 128 - len(room)) for index, room in taken] == [(0, 0), (0, 64), (1, 0), (1, 64)]
    assert slots.take(60) is None
    slots.give_back(0)
    assert slots.take(60) is None, "the other frame in that slot is not finished"
    slots.give_back(0)
    index, room = slots.take(60)
    assert (index, len(room)) == (0, 128)


def test_frames_to_receive_have_a_slot_each():
    slots = FrameSlots([torch.zeros(128), torch.zeros(128)], is_shared=False)
    assert [slots.take(10)[0], slots.take(10)[0]] == [0, 1]
    assert slots.take(10) is None
    slots.give_back(1)
    assert slots.take(10)[0] == 1


class CountingTransport:
    """Checks that frames lie in the slots without overlap, and counts the slots in use."""

    def __init__(self, transport):
        self.transport, self.needs_exact_size = transport, transport.needs_exact_size
        self.slot_sizes = []
        """Number and size of slots, for each allocation."""
        self.places_in_use, self.max_in_use, self.max_in_slot = Counter(), 0, 0

    def allocate_slots(self, count, num_bytes):
        self.slot_sizes.append((count, num_bytes))
        self.slots = self.transport.allocate_slots(count, num_bytes)
        return self.slots

    def send(self, frame, peer):
        return self._count(frame, self.transport.send(frame, peer))

    def receive(self, slot, peer):
        return self._count(slot, self.transport.receive(slot, peer))

    def close(self):
        self.transport.close()

    def _count(self, frame, handle):
        starts = [frame.data_ptr() - slot.data_ptr() for slot in self.slots]
        (slot,) = (
            index
            for index, (start, slot) in enumerate(zip(starts, self.slots, strict=True))
            if 0 <= start <= slot.numel() - frame.numel()
        )
        place = (slot, starts[slot], starts[slot] + frame.numel())
        for other, start, stop in +self.places_in_use:
            # One frame may be sent to several peers.
            overlaps = other == slot and start < place[2] and place[1] < stop
            assert not overlaps or (start, stop) == place[1:]
        self.places_in_use[place] += 1
        in_use = Counter(index for index, _, _ in +self.places_in_use)
        self.max_in_use = max(self.max_in_use, len(in_use))
        self.max_in_slot = max(self.max_in_slot, *in_use.values())
        return CountedHandle(self, place, handle)


class CountedHandle:
    def __init__(self, transport, place, handle):
        self.transport, self.place, self.handle = transport, place, handle

    def wait(self, timeout_s):
        frame = self.handle.wait(timeout_s)
        self.transport.places_in_use[self.place] -= 1
        return frame

    def release(self):
        self.handle.release()


class Team:
    """All ranks of a plan, one thread each; `timeout_s` is the deadline of a transfer."""

    def __init__(self, plan, trainer_layouts, rollout_layouts, timeout_s=DEADLINE_S):
        self.plan, self.trainer_layouts = plan, trainer_layouts
        self.writers = [PlainWeightWriter(layout) for layout in rollout_layouts]
        self.pool = ThreadPoolExecutor(plan.world_size)
        store = HashStore()

        def join(rank):
            gloo = GlooTransport.join(store, rank, plan.world_size, DEADLINE_S)
            transport = CountingTransport(gloo)
            layout = [*trainer_layouts, *rollout_layouts][rank]
            return transport, TransferExecutor(plan, rank, transport, layout, timeout_s)

        joined = list(self.pool.map(join, range(plan.world_size)))
        self.transports, self.executors = map(list, zip(*joined, strict=True))

    def transfer(self, tensors, version, absent=()):
        """Report, or what was raised, by rank."""
        for writer in self.writers:
            writer.clear()

        def work(rank):
            executor = self.executors[rank]
            try:
                if rank in absent:
                    return None
                if rank < self.plan.num_trainer_ranks:
                    return executor.send(cut(self.trainer_layouts[rank], tensors), version)
                return executor.receive(self.writers[rank - self.plan.num_trainer_ranks], version)
            except (RuntimeError, ValueError) as error:
                return error

        return list(self.pool.map(work, range(self.plan.world_size)))

    def close(self):
        for executor in self.executors:
            executor.close()
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


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(make_shape, "float32"), (make_moe_shape, "bfloat16")],
    ids=["dense-float32", "experts-bfloat16"],
)
def test_two_engines_get_ten_versions_and_forward_buckets(team, make, dtype):
    shape = make(num_layers=2, ffn_hidden_size=24)
    shapes = hf_shapes(shape)
    trainer_layouts = trainer_layouts_of(shape, tensor=2, pipeline=2)
    rollout_layouts = engine_layouts(shape, 2) * 2
    nodes = [RankLocation(0)] * 8
    plan = plan_transfer(
        trainer_layouts, rollout_layouts, nodes, dtype, names=list(shapes), bucket_bytes=2000
    )
    assert any(hop.source in plan.rollout_ranks for b in plan.buckets for hop in b.hops)
    group = team(plan, trainer_layouts, rollout_layouts)
    for version in range(10):
        tensors = {name: torch.randn(size) for name, size in shapes.items()}
        reports = group.transfer(tensors, version)
        for writer, rollout in zip(group.writers, rollout_layouts, strict=True):
            assert writer.missing == 0
            for name, values in cut(rollout, tensors).items():
                expected = values.to(getattr(torch, dtype)).float()
                assert torch.equal(writer.params[name], expected), name
    for rank, (report, transport) in enumerate(zip(reports, group.transports, strict=True)):
        hops = [(num_frame_bytes(b), hop) for b, hop in plan.hops_of(rank)]
        assert report.sent_bytes == sum(size for size, hop in hops if hop.source == rank)
        assert report.received_bytes == sum(size for size, hop in hops if hop.target == rank)
        assert report.duration_s > 0
        assert transport.slot_sizes == [(2, max([size for size, _ in hops], default=HEADER_BYTES))]
    assert max(transport.max_in_use for transport in group.transports) == NUM_SLOTS == 2
    assert max(t.max_in_slot for t in group.transports[:4]) <= MAX_FRAMES_PER_SLOT
    assert max(t.max_in_slot for t in group.transports[4:]) == 1


def small_team(team, **options):
    """Trainer ranks 0 and 1 hold half of `w` each; 2 wants all of it, 3 the second half too."""
    trainer_layouts = [layout(rows(0, 4)), layout(rows(4, 8))]
    rollout_layouts = [layout(rows(0, 8)), layout(rows(4, 8))]
    nodes = [RankLocation(0)] * 4
    plan = plan_transfer(
        trainer_layouts, rollout_layouts, nodes, "float32", names=["w"], bucket_bytes=16
    )
    return team(plan, trainer_layouts, rollout_layouts, **options)


def test_sources_of_a_tensor_are_the_ranks_that_sent_its_buckets(team):
    group = small_team(team)
    sources = group.executors[2].sources_of("w")
    assert sorted(number for numbers in sources.values() for number in numbers) == list(range(8))
    assert sources.keys() <= {0, 1, 3}
    assert group.executors[2].sources_of("v") == {}
    assert group.executors[0].sources_of("w") == {}


def test_a_silent_rank_is_named_at_the_deadline(team):
    group = small_team(team, timeout_s=1.0)
    errors = group.transfer({"w": torch.randn(8, 4)}, 1, absent=[0])
    assert isinstance(errors[2], RuntimeError)
    assert "rank 2 could not receive from rank 0 bucket" in str(errors[2])
    assert "(from w Rect(start=(" in str(errors[2])


def test_a_rank_that_has_left_is_named_at_once(team):
    group = small_team(team, timeout_s=120.0)
    assert not any(isinstance(r, Exception) for r in group.transfer({"w": torch.randn(8, 4)}, 1))
    group.executors[1].close()
    start_s = time.monotonic()
    errors = group.transfer({"w": torch.randn(8, 4)}, 2, absent=[1])
    assert time.monotonic() - start_s < 100
    messages = [str(error) for error in errors if isinstance(error, RuntimeError)]
    assert any("could not receive from rank 1 bucket" in message for message in messages)


def test_a_rank_that_refuses_a_version_leaves_and_nobody_waits_for_it(team):
    """Rank 2 expects the next version; rank 3 waits for others than rank 2 as well."""
    group = small_team(team, timeout_s=120.0)
    group.executors[2] = NextVersionExecutor(group.executors[2])
    start_s = time.monotonic()
    errors = group.transfer({"w": torch.randn(8, 4)}, 7)
    assert time.monotonic() - start_s < 100
    assert sum(isinstance(error, Exception) for error in errors) > 1
    assert isinstance(errors[2], ValueError)
    for fact in ("rank 2 could not receive from rank", "version 8", "is sending weight version 7"):
        assert fact in str(errors[2])
    again = group.transfer({"w": torch.randn(8, 4)}, 8)
    assert "rank 2 has left this session" in str(again[2])


class NextVersionExecutor:
    def __init__(self, executor):
        self.executor = executor

    def receive(self, writer, version):
        return self.executor.receive(writer, version + 1)

    def close(self):
        self.executor.close()


def test_a_plan_from_other_layouts_is_refused_before_anything_is_sent(team):
    group = small_team(team)
    with pytest.raises(InputError) as caught:
        TransferExecutor(group.plan, 0, group.transports[0].transport, layout(rows(4, 8)), 1.0)
    assert caught.value.name.startswith("blocks of this rank with w ")

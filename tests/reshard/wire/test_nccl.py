"""What the wire makes of NCCL's operations; the operations themselves where there are GPUs."""

from __future__ import annotations

import os
import time

import pytest
import torch

from mega_agentrl.reshard.wire.gloo import GlooWire
from mega_agentrl.reshard.wire.local import LocalHub
from mega_agentrl.reshard.wire.nccl import NcclWire, _errors_left_to_us
from mega_agentrl.reshard.wire.watch import Watch
from tests.reshard.wire.ranks import ranks


class Operation:
    """Over when told so; error: what it ended with."""

    def __init__(self, kind, size, peer):
        self.said = (kind, size, peer)
        self.over, self.error = False, None

    def is_completed(self):
        return self.over

    def wait(self, timeout):
        if self.error is not None:
            raise self.error


class PretendGroup:
    """A process group that records. Abort ends all operations, without an error, as on a GPU."""

    def __init__(self):
        self.operations, self.aborted = [], False

    def send(self, tensors, peer, tag):
        self.operations.append(Operation("send", len(tensors[0]), peer))
        return self.operations[-1]

    def recv(self, tensors, peer, tag):
        self.operations.append(Operation("recv", len(tensors[0]), peer))
        return self.operations[-1]

    def abort(self):
        self.aborted = True
        for operation in self.operations:
            operation.over = True


def wire_of_rank_one():
    hub = LocalHub(3)
    up, down = PretendGroup(), PretendGroup()
    wire = NcclWire(up, down, 1, torch.device("cpu"), Watch(hub.end(1), [0, 2]))
    return wire, up, down, hub


def test_each_direction_has_its_group_and_sizes_are_those_of_the_views():
    wire, up, down, hub = wire_of_rank_one()
    slot = torch.empty(100, dtype=torch.uint8)
    wire.receive(slot[:40], 0)
    wire.send(slot[:50], 2)
    wire.receive(slot[:60], 2)
    wire.send(slot[:70], 0)
    assert [operation.said for operation in up.operations] == [("recv", 40, 0), ("send", 50, 2)]
    assert [operation.said for operation in down.operations] == [("recv", 60, 2), ("send", 70, 0)]
    hub.end(1).close()


def test_a_frame_has_come_when_its_operation_is_over():
    wire, up, _, hub = wire_of_rank_one()
    slot = torch.arange(10, dtype=torch.uint8)
    arrival = wire.receive(slot[:4], 0)
    up.operations[0].over = True
    assert arrival.wait(1.0).tolist() == [0, 1, 2, 3]
    assert not up.aborted
    hub.end(1).close()


def test_the_deadline_aborts_everything_and_nothing_counts_as_come_after_it():
    wire, up, down, hub = wire_of_rank_one()
    slot = torch.empty(10, dtype=torch.uint8)
    late, other = wire.receive(slot, 0), wire.send(slot, 0)
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"with rank 0 in 0\.2 s"):
        late.wait(0.2)
    assert 0.15 < time.monotonic() - start_s < 5
    assert up.aborted
    assert down.aborted
    with pytest.raises(RuntimeError, match="with rank 0"):
        other.wait(1.0)  # its operation says it is over
    with pytest.raises(RuntimeError, match="with rank 0"):
        wire.send(slot, 2)
    hub.end(1).close()


def test_a_peer_that_leaves_ends_the_wait_at_once():
    wire, up, _, hub = wire_of_rank_one()
    departure = wire.send(torch.empty(10, dtype=torch.uint8), 2)
    hub.end(2).close()
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
        departure.wait(60.0)
    assert time.monotonic() - start_s < 10
    assert up.aborted
    hub.end(1).close()


def test_an_operation_that_ends_with_an_error_is_one():
    wire, up, _, hub = wire_of_rank_one()
    arrival = wire.receive(torch.empty(10, dtype=torch.uint8), 0)
    up.operations[0].over, up.operations[0].error = True, RuntimeError("remote error")
    with pytest.raises(RuntimeError, match="remote error"):
        arrival.wait(1.0)
    assert up.aborted
    hub.end(1).close()


def test_close_twice_and_what_waits_after_it():
    wire, up, down, hub = wire_of_rank_one()
    arrival = wire.receive(torch.empty(10, dtype=torch.uint8), 0)
    wire.close()
    wire.close()
    assert up.aborted
    assert down.aborted
    with pytest.raises(RuntimeError, match="this rank has closed"):
        arrival.wait(1.0)
    hub.end(1).close()


@pytest.mark.parametrize("before", [None, "3"])
def test_the_variable_is_set_only_for_the_making_of_a_group(monkeypatch, before):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with _errors_left_to_us():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before


def nccl_wire(store, rank, world_size, timeout_s):
    torch.cuda.set_device(rank)
    return NcclWire.join(
        store,
        rank,
        world_size,
        timeout_s,
        device=torch.device("cuda", rank),
        hops=[(0, 1), (1, 0)],
        control=GlooWire.join(store, rank, world_size, timeout_s),
    )


def exchange(seat, values):
    """To and from the other rank, at once."""
    peer, found = 1 - seat.rank, []
    for value in values:
        arrival = seat.wire.receive(seat.slots[0][:1000], peer)
        departure = seat.wire.send(seat.slots[1][:1000].fill_(value + seat.rank), peer)
        found.append(set(arrival.wait(20.0).tolist()))
        departure.wait(20.0)
    return found


def wait_in_vain(seat, timeout_s):
    start_s = time.monotonic()
    try:
        seat.wire.receive(seat.slots[0][:1000], 1 - seat.rank).wait(timeout_s)
    except RuntimeError as error:
        return str(error), time.monotonic() - start_s
    return "", time.monotonic() - start_s


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("end", ["deadline", "kill"])
def test_frames_go_both_ways_until_a_peer_is_late_or_gone(end):
    with ranks(2) as group:
        group.join(nccl_wire)
        for rank in (0, 1):
            group.start(rank, exchange, [5, 6, 7])
        assert group.finish(0) == [{6}, {7}, {8}]
        assert group.finish(1) == [{5}, {6}, {7}]
        group.start(0, wait_in_vain, 2.0 if end == "deadline" else 60.0)
        if end == "kill":
            time.sleep(0.5)
            group.kill(1)
        error, seconds = group.finish(0)
        assert "rank 1" in error
        assert seconds < 20

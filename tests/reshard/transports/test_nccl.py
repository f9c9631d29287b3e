"""The transport over a fake process group, and over NCCL where there are GPUs."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from mega_agentrl.reshard.transports import nccl
from mega_agentrl.reshard.transports.gloo import GlooTransport
from mega_agentrl.reshard.transports.nccl import (
    NcclTransport,
    PeerMonitor,
    _async_error_handling_disabled,
)
from tests.reshard.transports.in_process import InProcessHub
from tests.reshard.transports.ranks import close, ranks, wait_frame


class Operation:
    """Complete once `is_over` is set; raises `error` if there is one."""

    def __init__(self, kind, size, peer):
        self.call = (kind, size, peer)
        self.is_over, self.error = False, None

    def is_completed(self):
        return self.is_over

    def wait(self, timeout):
        if self.error is not None:
            raise self.error


class FakeProcessGroup:
    """A process group that records. Abort ends all operations, without an error, as on a GPU."""

    def __init__(self):
        self.operations, self.aborted = [], False

    def send(self, tensors, peer, tag, kind="send"):
        self.operations.append(Operation(kind, len(tensors[0]), peer))
        return self.operations[-1]

    def recv(self, tensors, peer, tag):
        return self.send(tensors, peer, tag, "recv")

    def abort(self):
        self.aborted = True
        for operation in self.operations:
            operation.is_over = True


@pytest.fixture
def rank_one():
    """The transport of rank 1 of 3, its ascending and descending groups, and the control hub."""
    hub = InProcessHub(3)
    up, down = FakeProcessGroup(), FakeProcessGroup()
    peer_monitor = PeerMonitor(hub.transport(1), [0, 2])
    yield NcclTransport(up, down, 1, torch.device("cpu"), peer_monitor), up, down, hub
    hub.transport(1).close()


SLOT = torch.arange(100, dtype=torch.uint8)


def test_each_direction_has_its_group_and_sizes_are_those_of_the_views(rank_one):
    transport, up, down, _ = rank_one
    assert transport.needs_exact_size
    transport.receive(SLOT[:40], 0)
    transport.send(SLOT[:50], 2)
    transport.receive(SLOT[:60], 2)
    transport.send(SLOT[:70], 0)
    assert [operation.call for operation in up.operations] == [("recv", 40, 0), ("send", 50, 2)]
    assert [operation.call for operation in down.operations] == [("recv", 60, 2), ("send", 70, 0)]


def test_a_frame_has_arrived_when_its_operation_is_over(rank_one):
    transport, up, _, _ = rank_one
    recv_handle = transport.receive(SLOT[:4], 0)
    up.operations[0].is_over = True
    assert recv_handle.wait(1.0).tolist() == [0, 1, 2, 3]
    assert not up.aborted


def test_the_deadline_aborts_everything_and_nothing_arrives_after_it(rank_one):
    transport, up, down, _ = rank_one
    late, other = transport.receive(SLOT, 0), transport.send(SLOT, 0)
    start_s = time.monotonic()
    # Errors of a transport reach the other ranks as text, which is asserted in this file.
    with pytest.raises(RuntimeError, match=r"with rank 0 did not end in 0\.2 s"):
        late.wait(0.2)
    assert time.monotonic() - start_s > 0.15
    assert up.aborted
    assert down.aborted
    with pytest.raises(RuntimeError, match="with rank 0"):
        other.wait(1.0)  # its operation says it is over
    with pytest.raises(RuntimeError, match="with rank 0"):
        transport.send(SLOT, 2)


def test_a_peer_that_leaves_ends_the_wait_at_once(rank_one):
    transport, up, _, hub = rank_one
    send_handle = transport.send(SLOT, 2)
    hub.transport(2).close()
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 is gone"):
        send_handle.wait(120.0)
    assert time.monotonic() - start_s < 100
    assert up.aborted


def test_an_operation_that_ends_with_an_error_raises_it(rank_one):
    transport, up, _, _ = rank_one
    recv_handle = transport.receive(SLOT, 0)
    up.operations[0].is_over, up.operations[0].error = True, RuntimeError("remote error")
    with pytest.raises(RuntimeError, match="remote error"):
        recv_handle.wait(1.0)
    assert up.aborted


def test_close_aborts_and_ends_waits_and_may_be_called_twice(rank_one):
    transport, up, down, _ = rank_one
    recv_handle = transport.receive(SLOT, 0)
    transport.close()
    transport.close()
    assert up.aborted
    assert down.aborted
    with pytest.raises(RuntimeError, match="this rank has closed"):
        recv_handle.wait(1.0)


class HangingGroup(FakeProcessGroup):
    """A process group whose communicators are never created; nor can it be aborted meanwhile."""

    def __init__(self):
        super().__init__()
        self.is_freed = threading.Event()

    def send(self, tensors, peer, tag, kind="send"):
        self.is_freed.wait()
        return super().send(tensors, peer, tag, kind)

    def abort(self):
        self.is_freed.wait()


@pytest.fixture
def hanging_group(monkeypatch):
    group = HangingGroup()
    monkeypatch.setattr(nccl, "_make_group", lambda store, rank, world_size: group)
    yield group
    group.is_freed.set()


@pytest.mark.parametrize(
    ("hops", "operation"),
    [([(1, 2), (0, 1)], "receive from rank 0"), ([(1, 2)], "send to rank 2")],
    ids=["receive", "send"],
)
@pytest.mark.parametrize("end", ["deadline", "peer is gone"])
@pytest.mark.usefixtures("hanging_group")
def test_a_communicator_that_is_never_created_ends_the_join(hops, operation, end):
    hub = InProcessHub(3)
    timeout_s, message = (0.3, "did not end within the 0.3 s") if end == "deadline" else (120, end)
    if end != "deadline":
        for peer in (0, 2):
            hub.transport(peer).close()
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=operation) as raised:
        NcclTransport.join(
            HashStore(),
            1,
            3,
            timeout_s,
            device=torch.device("cpu"),
            hops=hops,
            control=hub.transport(1),
        )
    assert message.removeprefix("peer ") in str(raised.value)
    assert time.monotonic() - start_s < 100
    hub.transport(1).close()


@pytest.mark.parametrize("before", [None, "3"])
def test_the_variable_is_set_only_while_a_group_is_made(monkeypatch, before):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with _async_error_handling_disabled():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before


def nccl_transport(store, rank, world_size, timeout_s):
    torch.cuda.set_device(rank)
    return NcclTransport.join(
        store,
        rank,
        world_size,
        timeout_s,
        device=torch.device("cuda", rank),
        hops=[(0, 1), (1, 0)],
        control=GlooTransport.join(store, rank, world_size, timeout_s),
    )


def exchange(rank_state, values):
    """To and from the other rank, at once."""
    peer, found = 1 - rank_state.rank, []
    for value in values:
        recv_handle = rank_state.transport.receive(rank_state.slots[0][:1000], peer)
        send_handle = rank_state.transport.send(
            rank_state.slots[1][:1000].fill_(value + rank_state.rank), peer
        )
        found.append(set(recv_handle.wait(300).tolist()))
        send_handle.wait(300)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("end", ["deadline", "kill"])
def test_frames_go_both_ways_until_a_peer_is_late_or_gone(end):
    with ranks(2) as group:
        group.join(nccl_transport)
        for rank in (0, 1):
            group.start(rank, exchange, [5, 6, 7])
        assert group.finish(0) == [{6}, {7}, {8}]
        assert group.finish(1) == [{5}, {6}, {7}]
        group.start(0, wait_frame, 1, 2.0 if end == "deadline" else 120.0)
        if end == "kill":
            time.sleep(0.5)
            group.kill(1)
        error, seconds = group.finish(0)
        assert "rank 1" in error
        assert seconds < 100


def watch(rank_state, peers):
    rank_state.saved.append(PeerMonitor(rank_state.transport, peers))


def lost_peers(rank_state, peer, timeout_s):
    """The peers that are lost when this one is, or at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while peer not in rank_state.saved[0].lost_peers and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return sorted(rank_state.saved[0].lost_peers)


@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_lost_peer_is_noticed_and_no_other_is_suspected(how):
    with ranks(3) as group:
        group.join(GlooTransport.join)
        group.ask(0, watch, [1, 2])
        group.ask(1, watch, [0])
        group.ask(2, watch, [0])
        assert group.ask(0, lost_peers, 1, 0.3) == []
        if how == "kill":
            group.kill(1)
        else:
            group.ask(1, close)
        assert group.ask(0, lost_peers, 1, 60.0) == [1]

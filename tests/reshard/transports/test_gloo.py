"""Frames between three ranks of one process: order, sizes, and peers that leave or stay silent."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from mega_agentrl.reshard.transports.gloo import GlooTransport, HostStagedTransport
from tests.reshard.transports.in_process import InProcessHub

DEADLINE_S = 10.0
SLOT_BYTES = 1000


@pytest.fixture
def transports():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda rank: GlooTransport.join(store, rank, 3, DEADLINE_S), range(3))
        )
    yield found
    for transport in found:
        transport.close()


def frame_of(number, num_bytes=SLOT_BYTES):
    return torch.full((num_bytes,), number, dtype=torch.uint8)


def test_slots_are_bytes_of_the_size_asked_for(transports):
    one, two = transports[0].allocate_slots(2, 77)
    assert (one.dtype, one.shape) == (torch.uint8, (77,))
    assert one.data_ptr() != two.data_ptr()
    assert not transports[0].needs_exact_size


def test_frames_arrive_in_the_order_in_which_they_were_sent(transports):
    send_handles = [transports[0].send(frame_of(number), 1) for number in range(20)]
    (slot,) = transports[1].allocate_slots(1, SLOT_BYTES)
    for number in range(20):
        recv_handle = transports[1].receive(slot, 0)
        assert torch.equal(recv_handle.wait(DEADLINE_S), frame_of(number))
        recv_handle.release()
    for send_handle in send_handles:
        send_handle.wait(DEADLINE_S)


def test_pairs_and_directions_are_independent(transports):
    slots = transports[0].allocate_slots(2, SLOT_BYTES)
    recv_handles = [
        transports[0].receive(slot, peer) for slot, peer in zip(slots, (1, 2), strict=True)
    ]
    there = [transports[0].send(frame_of(9), peer) for peer in (1, 2)]
    back = [transports[peer].send(frame_of(peer), 0) for peer in (2, 1)]
    for peer, recv_handle in zip((1, 2), recv_handles, strict=True):
        assert torch.equal(recv_handle.wait(DEADLINE_S), frame_of(peer))
    for peer in (1, 2):
        (slot,) = transports[peer].allocate_slots(1, SLOT_BYTES)
        assert torch.equal(transports[peer].receive(slot, 0).wait(DEADLINE_S), frame_of(9))
    for send_handle in (*there, *back):
        send_handle.wait(DEADLINE_S)


def test_a_slot_may_be_larger_than_the_frame(transports):
    send_handle = transports[0].send(frame_of(5, 10), 1)
    frame = transports[1].receive(frame_of(0), 0).wait(DEADLINE_S)
    send_handle.wait(DEADLINE_S)
    assert torch.equal(frame[:10], frame_of(5, 10))
    assert len(frame) == SLOT_BYTES


def test_a_silent_peer_is_an_error_at_the_deadline(transports):
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        transports[1].receive(frame_of(0), 0).wait(0.3)
    assert time.monotonic() - start_s > 0.2


@pytest.mark.parametrize("spoken_before", [True, False])
def test_a_peer_that_leaves_ends_the_wait_at_once(transports, spoken_before):
    if spoken_before:
        send_handle = transports[0].send(frame_of(1), 1)
        transports[1].receive(frame_of(0), 0).wait(DEADLINE_S)
        send_handle.wait(DEADLINE_S)
    else:
        transports[0].receive(frame_of(0), 1)
    recv_handle = transports[1].receive(frame_of(0), 0)
    start_s = time.monotonic()
    transports[0].close()
    transports[0].close()  # safe to call twice
    with pytest.raises(RuntimeError):
        recv_handle.wait(60.0)
    assert time.monotonic() - start_s < 50


def test_a_rank_that_does_not_come_is_an_error_at_the_deadline():
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooTransport.join(HashStore(), 0, 2, 0.5)
    assert time.monotonic() - start_s < 50


def exchange(device):
    hub = InProcessHub(2)
    sender, receiver = (HostStagedTransport(hub.transport(rank)) for rank in range(2))
    frame = torch.arange(50, dtype=torch.uint8, device=device)
    send_handle = sender.send(frame, 1)
    frame.fill_(0)  # what was sent is a copy
    slot = torch.zeros(50, dtype=torch.uint8, device=device)
    recv_handle = receiver.receive(slot, 0)
    got = recv_handle.wait(1.0)
    recv_handle.release()
    send_handle.wait(1.0)
    assert got.data_ptr() == slot.data_ptr()
    assert got.tolist() == list(range(50))
    sender.close()
    with pytest.raises(RuntimeError, match="closed"):
        receiver.receive(slot, 0).wait(1.0)


def test_a_frame_arrives_in_the_slot():
    exchange("cpu")


@pytest.mark.gpu
def test_a_frame_arrives_in_the_slot_of_a_gpu():
    exchange("cuda")

"""Frames between three ranks of one process: order, sizes, and peers that leave or stay silent."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from mega_agentrl.reshard.wire.gloo import GlooWire

DEADLINE_S = 10.0
SLOT_BYTES = 1000


@pytest.fixture
def wires():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: GlooWire.join(store, rank, 3, DEADLINE_S), range(3)))
    yield found
    for wire in found:
        wire.close()


def frame_of(number, num_bytes=SLOT_BYTES):
    return torch.full((num_bytes,), number, dtype=torch.uint8)


def test_slots_are_bytes_of_the_size_asked_for(wires):
    one, two = wires[0].slots(2, 77)
    assert (one.dtype, one.shape) == (torch.uint8, (77,))
    assert one.data_ptr() != two.data_ptr()
    assert not wires[0].exact


def test_frames_arrive_in_the_order_in_which_they_were_sent(wires):
    departures = [wires[0].send(frame_of(number), 1) for number in range(20)]
    (slot,) = wires[1].slots(1, SLOT_BYTES)
    for number in range(20):
        arrival = wires[1].receive(slot, 0)
        assert torch.equal(arrival.wait(DEADLINE_S), frame_of(number))
        arrival.done()
    for departure in departures:
        departure.wait(DEADLINE_S)


def test_pairs_and_directions_are_independent(wires):
    slots = wires[0].slots(2, SLOT_BYTES)
    arrivals = [wires[0].receive(slot, peer) for slot, peer in zip(slots, (1, 2), strict=True)]
    there = [wires[0].send(frame_of(9), peer) for peer in (1, 2)]
    back = [wires[peer].send(frame_of(peer), 0) for peer in (2, 1)]
    for peer, arrival in zip((1, 2), arrivals, strict=True):
        assert torch.equal(arrival.wait(DEADLINE_S), frame_of(peer))
    for peer in (1, 2):
        (slot,) = wires[peer].slots(1, SLOT_BYTES)
        assert torch.equal(wires[peer].receive(slot, 0).wait(DEADLINE_S), frame_of(9))
    for departure in (*there, *back):
        departure.wait(DEADLINE_S)


def test_a_slot_may_be_larger_than_the_frame(wires):
    departure = wires[0].send(frame_of(5, 10), 1)
    frame = wires[1].receive(frame_of(0), 0).wait(DEADLINE_S)
    departure.wait(DEADLINE_S)
    assert torch.equal(frame[:10], frame_of(5, 10))
    assert len(frame) == SLOT_BYTES


def test_a_silent_peer_is_an_error_at_the_deadline(wires):
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        wires[1].receive(frame_of(0), 0).wait(0.3)
    assert 0.2 < time.monotonic() - start_s < 5


@pytest.mark.parametrize("spoken_before", [True, False])
def test_a_peer_that_leaves_ends_the_wait_at_once(wires, spoken_before):
    if spoken_before:
        departure = wires[0].send(frame_of(1), 1)
        wires[1].receive(frame_of(0), 0).wait(DEADLINE_S)
        departure.wait(DEADLINE_S)
    else:
        wires[0].receive(frame_of(0), 1)
    arrival = wires[1].receive(frame_of(0), 0)
    start_s = time.monotonic()
    wires[0].close()
    wires[0].close()  # safe to call twice
    with pytest.raises(RuntimeError):
        arrival.wait(60.0)
    assert time.monotonic() - start_s < 10


def test_a_rank_that_does_not_come_is_an_error_at_the_deadline():
    start_s = time.monotonic()
    with pytest.raises(RuntimeError):
        GlooWire.join(HashStore(), 0, 2, 0.5)
    assert time.monotonic() - start_s < 10

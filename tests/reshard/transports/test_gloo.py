"""Peers that leave, stay silent or do not come; frames staged through the host."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.distributed import HashStore

from mega_agentrl.reshard.transports.gloo import GlooTransport, HostStagedTransport
from tests.reshard.transports.in_process import InProcessHub

DEADLINE_S = 300.0
SLOT_BYTES = 1000


@pytest.fixture
def transports():
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        join = partial(GlooTransport.join, store, world_size=3, timeout_s=DEADLINE_S)
        found = list(pool.map(join, range(3)))
    yield found
    for transport in found:
        transport.close()


def frame_of(number, num_bytes=SLOT_BYTES):
    return torch.full((num_bytes,), number, dtype=torch.uint8)


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
        recv_handle.wait(120.0)
    assert time.monotonic() - start_s < 100


def test_a_rank_that_does_not_come_is_an_error_at_the_deadline():
    with pytest.raises(RuntimeError):
        GlooTransport.join(HashStore(), 0, 2, 0.5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_frame_is_staged_through_the_host_into_the_slot(device):
    hub = InProcessHub(2)
    sender, receiver = (HostStagedTransport(hub.transport(rank)) for rank in range(2))
    assert not sender.needs_exact_size
    frame = torch.arange(50, dtype=torch.uint8, device=device)
    send_handle = sender.send(frame, 1)
    frame.fill_(0)  # what was sent is a copy
    slot = torch.zeros(50, dtype=torch.uint8, device=device)
    recv_handle = receiver.receive(slot, 0)
    received = recv_handle.wait(DEADLINE_S)
    recv_handle.release()
    send_handle.wait(DEADLINE_S)
    assert received.data_ptr() == slot.data_ptr()
    assert received.tolist() == list(range(50))
    sender.close()
    with pytest.raises(RuntimeError, match="closed"):
        receiver.receive(slot, 0).wait(DEADLINE_S)

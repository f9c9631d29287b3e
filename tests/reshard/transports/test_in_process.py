"""Threads of this process; a test may play several of them in turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mega_agentrl.reshard.transports.in_process import InProcessHub


def two():
    hub = InProcessHub(2)
    return hub.transport(0), hub.transport(1)


def test_frames_come_in_order_and_are_the_senders_memory():
    sender, receiver = two()
    slots = sender.allocate_slots(2, 8)
    sender.send(slots[0][:3].fill_(1), 1)
    sender.send(slots[1][:5].fill_(2), 1)
    recv_handles = [receiver.receive(torch.empty(0), 0) for _ in range(2)]
    frames = [recv_handle.wait(1.0) for recv_handle in recv_handles]
    assert [frame.tolist() for frame in frames] == [[1] * 3, [2] * 5]
    assert frames[0].data_ptr() == slots[0].data_ptr()


def test_a_frame_has_departed_when_it_has_been_read():
    sender, receiver = two()
    send_handle = sender.send(torch.zeros(1), 1)
    recv_handle = receiver.receive(torch.empty(0), 0)
    recv_handle.wait(1.0)
    with pytest.raises(RuntimeError, match=r"rank 1 in 0\.05 s"):
        send_handle.wait(0.05)
    recv_handle.release()
    send_handle.wait(0.0)


def test_a_chain_of_threads_passes_every_frame_on():
    hub = InProcessHub(3)
    values = list(range(40))

    def run(rank):
        transport = hub.transport(rank)
        slots = transport.allocate_slots(2, 16)
        found = []
        for value in values:
            if rank == 0:
                transport.send(slots[0].fill_(value), 1).wait(5.0)
                continue
            recv_handle = transport.receive(slots[0], rank - 1)
            frame = recv_handle.wait(5.0)
            if rank == 1:
                transport.send(frame, 2).wait(5.0)
            found.append(int(frame.sum()) // 16)
            recv_handle.release()
        return found

    with ThreadPoolExecutor(3) as pool:
        _, middle, last = pool.map(run, range(3))
    assert middle == last == values


@pytest.mark.parametrize("closer", [0, 1])
def test_close_wakes_whoever_waits(closer):
    ends = two()
    recv_handle = ends[1].receive(torch.empty(0), 0)
    timer = threading.Timer(0.1, ends[closer].close)
    timer.start()
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {closer} has closed"):
        recv_handle.wait(60.0)
    assert time.monotonic() - start_s < 50
    timer.join()


def test_a_frame_of_a_peer_that_has_closed_is_not_delivered():
    sender, receiver = two()
    send_handle = sender.send(torch.zeros(1), 1)
    sender.close()
    sender.close()
    with pytest.raises(RuntimeError, match="rank 0 has closed"):
        receiver.receive(torch.empty(0), 0).wait(1.0)
    with pytest.raises(RuntimeError, match="rank 0 has closed"):
        send_handle.wait(1.0)


def test_a_frame_that_does_not_come_ends_at_the_deadline():
    _, receiver = two()
    with pytest.raises(RuntimeError, match=r"nothing from rank 0 in 0\.05 s"):
        receiver.receive(torch.empty(0), 0).wait(0.05)


def test_a_rank_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="rank 2, expected less than 2"):
        InProcessHub(2).transport(2)

"""The copies on both sides, over threads of this process; on a GPU as well where there is one."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.transports.host_staged import HostStagedTransport
from mega_agentrl.reshard.transports.in_process import InProcessHub


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

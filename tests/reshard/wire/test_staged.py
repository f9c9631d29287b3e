"""The copies on both sides, over threads of this process; on a GPU as well where there is one."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.wire.local import LocalHub
from mega_agentrl.reshard.wire.staged import StagedWire


def exchange(device):
    hub = LocalHub(2)
    sender, receiver = (StagedWire(hub.end(rank)) for rank in range(2))
    frame = torch.arange(50, dtype=torch.uint8, device=device)
    departure = sender.send(frame, 1)
    frame.fill_(0)  # what was sent is a copy
    slot = torch.zeros(50, dtype=torch.uint8, device=device)
    arrival = receiver.receive(slot, 0)
    got = arrival.wait(1.0)
    arrival.done()
    departure.wait(1.0)
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

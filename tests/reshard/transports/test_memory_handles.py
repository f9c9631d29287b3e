"""Memory of this process and of another one."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from mega_agentrl.reshard.transports.memory_handles import CudaIpcMemory, MemfdMemory
from tests.reshard.transports.ranks import ranks


def allocate(rank_state, num_bytes):
    rank_state.saved.append(MemfdMemory().allocate(num_bytes))
    rank_state.saved[-1].tensor.fill_(7)
    return rank_state.saved[-1].handle()


def first_byte(rank_state):
    return int(rank_state.saved[-1].tensor[0])


def test_another_process_shares_the_memory_and_keeps_it_after_the_owners_death():
    with ranks(1) as group:
        handle = group.ask(0, allocate, 5000)
        tensor = MemfdMemory().open(handle)
        assert tensor.tolist() == [7] * 5000
        tensor[0] = 9
        assert group.ask(0, first_byte) == 9
        group.kill(0)
        assert tensor[1:].tolist() == [7] * 4999
        with pytest.raises(RuntimeError, match=r"memory of process \d+.*has ended"):
            MemfdMemory().open(handle)


def test_a_handle_that_now_means_another_file_is_refused():
    block = MemfdMemory().allocate(10)
    pid, number, _ = block.handle().decode().split()
    with pytest.raises(RuntimeError, match=r"expected reshard-other .*memfd:reshard-"):
        MemfdMemory().open(f"{pid} {number} reshard-other".encode())


def test_memory_is_gone_with_the_last_tensor_on_it():
    def count():
        gc.collect()
        mappings = Path("/proc/self/maps").read_text().count("/memfd:reshard-")
        return mappings, len(os.listdir("/proc/self/fd"))

    before = count()
    block = MemfdMemory().allocate(10)
    peer = MemfdMemory().open(block.handle())
    view = peer[3:5]
    assert count()[0] == before[0] + 2
    block.close()
    del block, peer
    assert count()[0] == before[0] + 1
    view.fill_(1)  # still there
    del view
    assert count() == before


@pytest.mark.gpu
def test_a_process_finds_its_own_device_memory():
    memory = CudaIpcMemory(torch.device("cuda", torch.cuda.current_device()))
    block = memory.allocate(100)
    block.tensor.fill_(3)
    assert memory.open(block.handle()).data_ptr() == block.tensor.data_ptr()


def allocate_on_device(rank_state, num_bytes):
    rank_state.saved.append(CudaIpcMemory(torch.device("cuda", 0)).allocate(num_bytes))
    rank_state.saved[-1].tensor.fill_(7)
    torch.cuda.synchronize()
    return rank_state.saved[-1].handle()


@pytest.mark.gpu
def test_another_process_shares_device_memory():
    with ranks(1) as group:
        handle = group.ask(0, allocate_on_device, 5000)
        tensor = CudaIpcMemory(torch.device("cuda", 0)).open(handle)
        assert tensor.tolist() == [7] * 5000
        tensor[0] = 9
        torch.cuda.synchronize()
        assert group.ask(0, first_byte) == 9
        del tensor

"""Memory of this process and of another one."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.transports.memory_handles import (
    CudaIpcMemory,
    MemfdMemory,
    without_expandable_segments,
)
from tests.reshard.transports.ranks import ranks


def allocate(rank_state, memory, num_bytes):
    rank_state.saved.append(memory.allocate(num_bytes))
    rank_state.saved[-1].tensor.fill_(7)
    memory.synchronize()
    return rank_state.saved[-1].handle()


def allocate_although_segments_expand(rank_state, memory, num_bytes):
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.empty(num_bytes, dtype=torch.uint8, device="cuda")  # leaves a free block of a segment
    return allocate(rank_state, memory, num_bytes)


def first_byte(rank_state):
    return int(rank_state.saved[-1].tensor[0])


def test_another_process_shares_the_memory_and_keeps_it_after_the_owners_death():
    with ranks(1) as group:
        handle = group.ask(0, allocate, MemfdMemory(), 5000)
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
    with pytest.raises(RuntimeError, match="expected reshard-other"):
        MemfdMemory().open(f"{pid} {number} reshard-other".encode())


@pytest.fixture
def allocator_settings():
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            "max_split_size_mb:512,expandable_segments:True,roundup_power2_divisions:[256:1,512:2]",
            "max_split_size_mb:512,expandable_segments:False,roundup_power2_divisions:[256:1,512:2]",
        ),
        ("expandable_segments:False", "expandable_segments:False"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        ("", ""),
    ],
    ids=["expandable", "fixed", "other", "none"],
)
def test_segments_do_not_expand_while_shared_memory_is_allocated(
    settings, expected, allocator_settings
):
    allocator_settings(settings)
    with without_expandable_segments():
        assert torch._C._accelerator_getAllocatorSettings() == expected
    assert torch._C._accelerator_getAllocatorSettings() == settings


@pytest.mark.gpu
def test_device_memory_is_shared_although_segments_expand():
    memory = CudaIpcMemory(torch.device("cuda", 0))
    with ranks(1) as group:
        tensor = memory.open(group.ask(0, allocate_although_segments_expand, memory, 50_000_000))
        assert bool((tensor == 7).all())
        del tensor


@pytest.mark.gpu
def test_a_process_finds_its_own_device_memory():
    memory = CudaIpcMemory(torch.device("cuda", torch.cuda.current_device()))
    block = memory.allocate(100)
    assert memory.open(block.handle()).data_ptr() == block.tensor.data_ptr()


@pytest.mark.gpu
def test_another_process_shares_device_memory():
    memory = CudaIpcMemory(torch.device("cuda", 0))
    with ranks(1) as group:
        tensor = memory.open(group.ask(0, allocate, memory, 5000))
        assert tensor.tolist() == [7] * 5000
        tensor[0] = 9
        memory.synchronize()
        assert group.ask(0, first_byte) == 9
        del tensor

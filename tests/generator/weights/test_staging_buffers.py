"""A buffer is used again when nothing lies in it any more, and not before."""

from __future__ import annotations

import torch

from mega_agentrl.generator.weights.staging_buffers import StagingBufferPool


def test_a_buffer_is_used_again_by_what_fits():
    pool = StagingBufferPool()
    (first,) = pool.allocate([8192])
    at = first.data_ptr()
    del first
    (smaller,) = pool.allocate([5000])
    assert smaller.data_ptr() == at
    assert smaller.shape == (5000,)


def test_whoever_keeps_a_tensor_keeps_its_values():
    pool = StagingBufferPool()
    weight, bias = pool.allocate([8192, 64])
    weight.fill_(1)
    values = torch.nn.Parameter(bias.fill_(2).view(torch.float32).detach()).data[:4]
    del weight, bias
    (other,) = pool.allocate([8192])
    other.fill_(3)
    assert values.view(torch.uint8).tolist() == [2] * 16
    at = values.untyped_storage().data_ptr()
    del values
    assert pool.allocate([8192])[0].data_ptr() == at


def test_parts_lie_apart_and_are_aligned():
    parts = StagingBufferPool().allocate([3, 64, 8, 1])
    starts = [part.data_ptr() for part in parts]
    assert [start - starts[0] for start in starts] == [0, 64, 128, 192]
    assert [part.numel() for part in parts] == [3, 64, 8, 1]
    parts[2].view(torch.float64).fill_(1.0)


def test_there_are_no_more_buffers_than_were_allocated_at_a_time():
    pool = StagingBufferPool()
    for size in (8192, 16384, 4096, 65536):  # a larger one takes the place of a smaller
        lent = pool.allocate([size])
        assert len(pool._free_buffers) == 0
        del lent
        assert len(pool._free_buffers) == 1
    assert [len(buffer) for buffer in pool._free_buffers] == [65536]
    pool.clear()
    assert pool._free_buffers == []

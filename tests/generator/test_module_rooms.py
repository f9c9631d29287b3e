"""A room is used again when nothing lies in it any more, and not before."""

from __future__ import annotations

import torch

from mega_agentrl.generator.module_rooms import ModuleRooms


def test_a_room_is_used_again_by_what_fits():
    rooms = ModuleRooms()
    (first,) = rooms.lend([8192])
    at = first.data_ptr()
    del first
    (smaller,) = rooms.lend([5000])
    assert smaller.data_ptr() == at
    assert smaller.shape == (5000,)


def test_whoever_keeps_a_tensor_keeps_its_values():
    rooms = ModuleRooms()
    weight, bias = rooms.lend([8192, 64])
    weight.fill_(1)
    kept = torch.nn.Parameter(bias.fill_(2).view(torch.float32).detach()).data[:4]
    del weight, bias
    (other,) = rooms.lend([8192])
    other.fill_(3)
    assert kept.view(torch.uint8).tolist() == [2] * 16
    at = kept.untyped_storage().data_ptr()
    del kept
    assert rooms.lend([8192])[0].data_ptr() == at


def test_parts_lie_apart_and_are_aligned():
    parts = ModuleRooms().lend([3, 64, 8, 1])
    starts = [part.data_ptr() for part in parts]
    assert [start - starts[0] for start in starts] == [0, 64, 128, 192]
    assert [part.numel() for part in parts] == [3, 64, 8, 1]
    parts[2].view(torch.float64).fill_(1.0)


def test_there_are_no_more_rooms_than_were_lent_at_a_time():
    rooms = ModuleRooms()
    for size in (8192, 16384, 4096, 65536):  # a larger one takes the place of a smaller
        lent = rooms.lend([size])
        assert len(rooms._free) == 0
        del lent
        assert len(rooms._free) == 1
    assert [len(room) for room in rooms._free] == [65536]
    rooms.clear()
    assert rooms._free == []

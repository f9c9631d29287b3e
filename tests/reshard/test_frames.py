"""Frames by hand: where every byte is, what a rank reads back, and what a wrong header says."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.frames import (
    END_OF_UPDATE,
    HEADER_BYTES,
    FrameCodec,
    PartBatch,
    check_header,
    num_frame_bytes,
    write_end_frame,
)
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.planner.transfer_plan import (
    Bucket,
    Hop,
    ParamSlice,
    TensorSlice,
    TransferPlan,
)

MAGIC = 0x6D65676157
VERSION = 41

# A trainer rank holds rows 2-3 of `w` as its parameter `ours`, padded, and the vector `v` behind
# another in `both`; a rollout rank holds all of `w` (twice) and `v` in a stack of experts.
SOURCE = [
    ShardLayout("ours", (3, 3), (Block("w", Rect((2, 0), (4, 3)), Rect((0, 0), (2, 3))),)),
    ShardLayout(
        "both",
        (8,),
        (
            Block("u", Rect((0,), (4,)), Rect((0,), (4,))),
            Block("v", Rect((0,), (4,)), Rect((4,), (8,))),
        ),
    ),
]
SINK = [
    ShardLayout("one", (4, 3), (Block("w", Rect.whole((4, 3)), Rect.whole((4, 3))),)),
    ShardLayout("two", (4, 3), (Block("w", Rect.whole((4, 3)), Rect.whole((4, 3))),)),
    ShardLayout("stack", (2, 4, 1), (Block("v", Rect((0,), (4,)), Rect((1, 0, 0), (2, 4, 1))),)),
]
BUCKET = Bucket(
    7,
    20,
    (TensorSlice("w", Rect((2, 1), (4, 3)), 8), TensorSlice("v", Rect((1,), (4,)), 12)),
    (Hop(0, 1),),
)
PLAN = TransferPlan(1, 1, {"w": "bfloat16", "v": "float32"}, (BUCKET,))


def written(version=VERSION):
    shards = {
        "ours": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [9.0, 9.0, 9.0]]),
        "both": torch.tensor([-1.0, -2.0, -3.0, -4.0, 0.5, 1.5, 2.5, 3.5], dtype=torch.bfloat16),
    }
    slot = torch.full((100,), 0xEE, dtype=torch.uint8)
    return FrameCodec(PLAN, SOURCE).write(BUCKET, slot, shards, version), slot


def test_a_frame_has_a_header_and_its_slices_row_by_row():
    # 32 bytes of header, 8 of `w` and 8 up to the next multiple of 16, 12 of `v` and 4 more.
    assert num_frame_bytes(BUCKET) == HEADER_BYTES + 16 + 16 == 64
    frame, slot = written()
    got = bytes(frame.tolist())
    assert len(got) == 64
    assert struct.unpack("<4q", got[:32]) == (MAGIC, VERSION, 7, 32)
    # bfloat16 is the upper half of float32: 2.0 3.0 / 5.0 6.0, row-major.
    halves = [struct.pack("<f", number)[2:] for number in (2.0, 3.0, 5.0, 6.0)]
    assert got[32:40] == b"".join(halves)
    assert got[48:60] == struct.pack("<3f", 1.5, 2.5, 3.5)
    assert set(slot[64:].tolist()) == {0xEE}
    assert frame.data_ptr() == slot.data_ptr()


def test_a_rank_reads_its_slices_at_every_place_that_it_holds_them():
    frame, _ = written()
    params = {shard.name: torch.zeros(shard.shape) for shard in SINK}
    batch = FrameCodec(PLAN, SINK).batch(BUCKET)
    batch.unpack(frame, params)
    assert batch.param_names == ("one", "two", "stack")
    assert batch.numel == 4 + 4 + 3
    for name in ("one", "two"):
        assert params[name].tolist() == [[0, 0, 0], [0, 0, 0], [0, 2, 3], [0, 5, 6]]
    assert params["stack"].flatten().tolist() == [0, 0, 0, 0, 0, 1.5, 2.5, 3.5]


def test_parts_of_one_module_in_sequence_are_one_run():
    names = ("a.w", "a.b", "b.w", "a.w")
    part = FrameCodec(PLAN, SOURCE).batch(BUCKET).parts[0]
    parts = [replace(part, param_slice=ParamSlice(name, part.param_slice.rect)) for name in names]
    runs = PartBatch(tuple(parts)).split_by_module()
    assert [(path, run.parts) for path, run in runs] == [
        ("a", tuple(parts[:2])), ("b", (parts[2],)), ("a", (parts[3],))
    ]  # fmt: skip


def test_gradients_are_not_recorded():
    shards = {"ours": torch.ones(3, 3, requires_grad=True), "both": torch.ones(8)}
    frame = FrameCodec(PLAN, SOURCE).write(BUCKET, torch.empty(64, dtype=torch.uint8), shards, 0)
    assert not frame.requires_grad


def test_the_right_header_of_a_bucket_and_of_the_end_passes():
    frame, slot = written()
    check_header(frame, VERSION, BUCKET)
    check_header(slot, VERSION, BUCKET)
    end = write_end_frame(slot, VERSION)
    assert struct.unpack("<4q", bytes(end.tolist())) == (MAGIC, VERSION, END_OF_UPDATE, 0)
    check_header(slot, VERSION, None)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (0, 0, BUCKET),
        (1, 40, BUCKET),
        (2, 8, BUCKET),
        (2, END_OF_UPDATE, BUCKET),
        (3, 48, BUCKET),
        (2, 7, None),
    ],
    ids=["magic", "version", "bucket", "early-end", "size", "no-end"],
)
def test_a_wrong_header_is_refused_with_its_fields(field, value, expected):
    frame, _ = written()
    frame[:HEADER_BYTES].view(torch.int64)[field] = value
    with pytest.raises(InputError) as caught:
        check_header(frame, VERSION, expected)
    assert caught.value.got[field] == value

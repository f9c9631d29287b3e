"""Frames by hand: where every byte is, what a rank reads back, and what a wrong header says."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.frames import (
    END_OF_UPDATE,
    HEADER_BYTES,
    FrameCodec,
    check_header,
    num_frame_bytes,
    write_end_frame,
)
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.transfer_plan import Bucket, Hop, TensorSlice, TransferPlan
from mega_agentrl.reshard.topology import RankLocation
from tests.reshard.faults import cut
from tests.reshard.model_cuts import all_parallel_ranks, make_moe_shape
from tests.reshard.rollout_cuts import rollout_layout

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


def test_every_byte_by_hand():
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


def test_places_and_values_that_are_read_back():
    frame, _ = written()
    got = {
        param_slice.param: (param_slice.rect, values) for param_slice, values in _read(SINK, frame)
    }
    assert got.keys() == {"one", "two", "stack"}
    for name in ("one", "two"):
        rect, values = got[name]
        assert rect == Rect((2, 1), (4, 3))
        assert values.dtype is torch.bfloat16
        assert values.tolist() == [[2.0, 3.0], [5.0, 6.0]]
    rect, values = got["stack"]
    assert rect == Rect((1, 1, 0), (2, 4, 1))
    assert values.tolist() == [[[1.5], [2.5], [3.5]]]


def _read(layout, frame):
    return list(FrameCodec(PLAN, layout).read(BUCKET, frame))


def test_gradients_are_not_recorded():
    shards = {"ours": torch.ones(3, 3, requires_grad=True), "both": torch.ones(8)}
    frame = FrameCodec(PLAN, SOURCE).write(BUCKET, torch.empty(64, dtype=torch.uint8), shards, 0)
    assert not frame.requires_grad


@settings(max_examples=20)
@given(
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4000),
)
def test_all_frames_of_a_model_with_experts_make_all_shards(dtype, rollout, bucket_bytes):
    """Float32 shards over any dtype, into stacks of experts."""
    shape = make_moe_shape(
        num_layers=2, moe_layer_pattern=[True, False], ffn_hidden_size=8, tie_word_embeddings=False
    )
    trainer_layouts = [
        megatron_layout(shape, parallel_rank)
        for parallel_rank in all_parallel_ranks(tensor=2, pipeline=2)
    ]
    rollout_layouts = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    nodes = [RankLocation(0)] * (len(trainer_layouts) + len(rollout_layouts))
    shapes = hf_shapes(shape)
    plan = plan_transfer(
        trainer_layouts,
        rollout_layouts,
        nodes,
        dtype,
        names=list(shapes),
        bucket_bytes=bucket_bytes,
    )
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    shards = [cut(layout, tensors) for layout in trainer_layouts]
    writers = [FrameCodec(plan, layout) for layout in trainer_layouts]
    for target_layout, layout in zip(plan.rollout_ranks, rollout_layouts, strict=True):
        reader, got = FrameCodec(plan, layout), cut(layout, {n: t * 0 for n, t in tensors.items()})
        for bucket, hop in plan.hops_of(target_layout):
            if hop.target == target_layout:
                root = bucket.hops[0].source
                slot = torch.empty(num_frame_bytes(bucket), dtype=torch.uint8)
                frame = writers[root].write(bucket, slot, shards[root], 1)
                for param_slice, values in reader.read(bucket, frame):
                    got[param_slice.param][param_slice.rect.slices] = values
        for name, expected in cut(layout, tensors).items():
            assert torch.equal(got[name], expected.to(getattr(torch, dtype)).float()), name


def test_a_plan_from_other_layouts_names_the_tensor():
    with pytest.raises(ValueError, match=r"w Rect\(start=\(2, 1\).*lies in no block.*other layout"):
        FrameCodec(PLAN, SOURCE[1:]).parts(BUCKET)
    beyond = replace(BUCKET, slices=(TensorSlice("w", Rect((1, 1), (3, 3)), 8),))
    with pytest.raises(ValueError, match=r"w Rect\(start=\(1, 1\).*lies in no block"):
        FrameCodec(PLAN, SOURCE).parts(beyond)


def test_the_right_header_passes():
    frame, slot = written()
    check_header(frame, VERSION, BUCKET)
    check_header(slot, VERSION, BUCKET)
    end = write_end_frame(slot, VERSION)
    assert struct.unpack("<4q", bytes(end.tolist())) == (MAGIC, VERSION, END_OF_UPDATE, 0)
    check_header(slot, VERSION, None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, 0, r"expected bucket 7 of weight version 41 with 32 bytes, .*not a frame"),
        (1, 40, r"a frame of weight version 40"),
        (2, 8, r"a bucket was lost or sent twice: bucket 8 arrived"),
        (2, END_OF_UPDATE, r"a bucket was lost or sent twice: the end of the update"),
        (3, 48, r"with 32 bytes, header says .*, 41, 7, 48\]: .* has another size.*other layouts"),
    ],
)
def test_a_wrong_header_says_what_came(field, value, message):
    frame, _ = written()
    frame[:HEADER_BYTES].view(torch.int64)[field] = value
    with pytest.raises(ValueError, match=message):
        check_header(frame, VERSION, BUCKET)


def test_a_bucket_in_place_of_the_end():
    frame, _ = written()
    with pytest.raises(ValueError, match=r"expected the end of .* 41.*: bucket 7 arrived instead"):
        check_header(frame, VERSION, None)

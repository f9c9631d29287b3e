"""Digests of the trainer ranks, summed, equal those of the rollout ranks unless something is wrong.

What is wrong is then named, even if all ranks agree on a wrong plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts
from mega_agentrl.reshard.frames import FrameCodec, num_frame_bytes
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import HF_EMBEDDING, hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.transfer_plan import ParamSlice
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.digest import compute_digests
from mega_agentrl.reshard.verify.digest_accumulator import DigestAccumulator, ParamBlock
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestRegion,
    DigestVerifier,
    ReceivedDigests,
    RegionIndex,
    RegionPart,
    SourceDigests,
    collect_regions,
    regions_of_layout,
)
from tests.reshard.fake_rollout import expected_of, frame_of
from tests.reshard.faults import cut
from tests.reshard.model_cuts import (
    make_moe_shape,
    make_shape,
    models_and_ranks,
    trainer_layouts_of,
    widened,
)
from tests.reshard.rollout_cuts import engine_layouts
from tests.vision_models import VISION_FAMILIES, make_vision_model

TENSORS = {"w": torch.arange(32.0).reshape(8, 4), "v": torch.randn(6)}


def shard(name, *blocks, shape):
    return ShardLayout(name, shape, tuple(Block(*block) for block in blocks))


def rows(start, stop, at=0):
    """Rows of `w` at row `at` of a parameter."""
    return "w", Rect((start, 0), (stop, 4)), Rect((at, 0), (at + stop - start, 4))


def held(*blocks, shape=(8, 4)):
    return [shard("p", *blocks, shape=shape)]


def types(dtype="float32", names=("w", "v")):
    return dict.fromkeys(names, dtype)


def expected_digests(layouts, tensors, regions, dtype_of, spoiled=None):
    """Digest by region. spoiled: shards, by rank, that are other than they should be."""
    digests = []
    for rank, layout in enumerate(layouts):
        shards = (spoiled or {}).get(rank) or cut(layout, tensors)
        digests.append(SourceDigests(layout, regions, dtype_of).compute(shards.__getitem__))
    digests = DigestVerifier(layouts, regions).expected_digests(digests)
    return {region: tuple(map(int, row)) for region, row in zip(regions, digests, strict=True)}


def received_digests(layout, params, dtype_of):
    received = ReceivedDigests(layout, dtype_of)
    received.compute((s, params[s.name]) for s in layout)
    return received


def wrong_regions(layout, params, digest_of, dtype_of):
    received = received_digests(layout, params, dtype_of)
    return received.find_mismatches(expected_of(received.regions, digest_of))


VECTOR = shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))


def test_equal_rectangles_are_one_region_with_parts_by_rank():
    rollout = [*held(rows(0, 6)), shard("again", rows(0, 6), shape=(6, 4)), *held(rows(6, 8))]
    first, second = (DigestRegion("w", Rect((a, 0), (b, 4))) for a, b in ((0, 6), (6, 8)))
    assert regions_of_layout(rollout) == [first, second]
    assert collect_regions([held(rows(6, 8)), rollout]) == [first, second]
    region_index = RegionIndex([first, second])
    assert region_index.parts_of(held(rows(4, 8))) == [
        RegionPart(0, Rect((4, 0), (6, 4))),
        RegionPart(1, Rect((6, 0), (8, 4))),
    ]
    assert region_index.parts_of([VECTOR]) == []
    assert region_index.regions_of(held(rows(4, 8))) == [first, second]
    assert region_index.regions_of([VECTOR]) == []


@settings(max_examples=25)
@given(
    models_and_ranks(),
    st.sampled_from([1, 2]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_both_sides_agree_for_any_model_and_cut(model, rollout, dtype):
    """Tied embeddings, replicas, experts and repeated heads included."""
    shape, parallel_ranks = model
    shape = widened(shape, rollout)
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    trainer_layouts = [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks]
    rollout_layouts = engine_layouts(shape, rollout)
    dtype_of = types(dtype, shapes)
    regions = collect_regions(rollout_layouts)
    digest_of = expected_digests(trainer_layouts, tensors, regions, dtype_of)
    for layout in rollout_layouts:
        params = {n: p.to(getattr(torch, dtype)) for n, p in cut(layout, tensors).items()}
        assert wrong_regions(layout, params, digest_of, dtype_of) == []


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("rollout", [1, 2])
def test_both_sides_agree_on_a_vision_tower(tmp_path, family, rollout):
    shape = ModelShape.from_folder(make_vision_model(family, tmp_path))
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    trainer_layouts = trainer_layouts_of(shape, tensor=2, pipeline=2, data=2)
    rollout_layouts = [engine_shard_layouts(shape, rank, rollout) for rank in range(rollout)]
    dtype_of = types("bfloat16", shapes)
    regions = collect_regions(rollout_layouts)
    digest_of = expected_digests(trainer_layouts, tensors, regions, dtype_of)
    kernel = f"{shape.family.hf_vision_prefix}patch_embed.proj.weight"
    for layout in rollout_layouts:
        params = {n: p.bfloat16() for n, p in cut(layout, tensors).items()}
        assert wrong_regions(layout, params, digest_of, dtype_of) == []
        params[kernel] = params[kernel].flip(2)
        (wrong,) = wrong_regions(layout, params, digest_of, dtype_of)
        assert wrong.hf_name == kernel


@pytest.mark.parametrize(
    ("rank", "replica", "param", "hf_name"),
    [
        (3, 1, "decoder.layers.0.self_attention.linear_qkv.weight", "model.layers.0.self_attn."),
        (4, 0, "output_layer.weight", HF_EMBEDDING),  # the embedding's copy on the last stage
    ],
    ids=["data-replica", "tied-embedding"],
)
def test_replicas_that_differ_are_named(rank, replica, param, hf_name):
    shape = make_shape(num_layers=2, tie_word_embeddings=True)
    tensors = {name: torch.randn(size) for name, size in hf_shapes(shape).items()}
    trainer_layouts = trainer_layouts_of(shape, tensor=2, pipeline=2, data=2)
    regions = collect_regions(engine_layouts(shape, 2))
    shards = cut(trainer_layouts[rank], tensors)
    shards[param][0, 0] += 1
    with pytest.raises(InputError) as caught:
        expected_digests(trainer_layouts, tensors, regions, types(names=tensors), {rank: shards})
    assert hf_name in caught.value.name
    assert caught.value.got == (replica, rank)


@pytest.mark.parametrize(
    ("layouts", "num_held"),
    [
        ([held(rows(0, 3)), held(rows(4, 8))], 28),
        ([[VECTOR]], 0),
        ([held(rows(0, 5)), held(rows(3, 8))], 40),
    ],
    ids=["hole", "other-tensor", "overlap"],
)
def test_a_region_that_is_not_held_once_is_named(layouts, num_held):
    with pytest.raises(InputError) as caught:
        DigestVerifier(layouts, collect_regions([held(rows(0, 8))]))
    assert caught.value.got == num_held


TWICE = [shard("one", rows(0, 4), shape=(4, 4)), shard("two", rows(0, 4, at=1), shape=(5, 4))]


def test_a_region_held_twice_must_have_the_same_values_in_both_places():
    params = cut(TWICE, TENSORS)
    regions = received_digests(TWICE, params, types()).regions
    assert regions == [DigestRegion("w", Rect((0, 0), (4, 4)))]
    digest_of = {regions[0]: digest_of_values(TENSORS["w"][:4], regions[0].rect)}
    assert wrong_regions(TWICE, params, digest_of, types()) == []
    params["two"][2, 3] += 1
    assert wrong_regions(TWICE, params, digest_of, types()) == regions


def test_regions_without_a_digest_are_mismatches():
    layout = [*held(rows(0, 4)), VECTOR]
    received = ReceivedDigests(layout, types())
    regions, params = received.regions, cut(layout, TENSORS)
    expected = expected_of(regions, expected_digests([layout], TENSORS, regions, types()))
    assert received.find_mismatches(expected) == regions
    received.compute([(VECTOR, params["v"])])
    assert received.find_mismatches(expected) == [DigestRegion("w", Rect((0, 0), (4, 4)))]
    received.compute([(layout[0], params["p"])])
    assert received.find_mismatches(expected) == []
    received.reset()
    assert received.find_mismatches(expected) == regions
    # The digest of zeros is 0, but nothing has been received.
    assert received.find_mismatches(np.zeros_like(expected)) == regions


def execute_directly(plan, trainer_layouts, rollout_layouts, tensors):
    """Parameters of all rollout ranks if every frame comes straight from the first holder."""
    received = [{s.name: torch.zeros(s.shape) for s in layout} for layout in rollout_layouts]
    for bucket in plan.buckets:
        layout = trainer_layouts[bucket.hops[0].source]
        slot = torch.empty(num_frame_bytes(bucket), dtype=torch.uint8)
        frame = FrameCodec(plan, layout).write(bucket, slot, cut(layout, tensors), 1)
        for target in {hop.target - plan.num_trainer_ranks for hop in bucket.hops}:
            batch = FrameCodec(plan, rollout_layouts[target]).batch(bucket)
            batch.unpack(frame, received[target])
    return received


def wrong_plans(plan):
    """Plans that every rank can execute but that transfer something else, with the slices hit."""
    for bucket in plan.buckets:
        slices = bucket.slices
        yield replace(plan, buckets=tuple(b for b in plan.buckets if b is not bucket)), slices
        for one, tensor_slice in enumerate(slices):
            twins = [
                p for p in slices if p.rect.shape == tensor_slice.rect.shape and p != tensor_slice
            ]
            if twins:  # one is sent twice, the other never
                spoiled = (*slices[:one], twins[0], *slices[one + 1 :])
                yield _with(plan, bucket, spoiled), (tensor_slice,)


def _with(plan, bucket, slices):
    buckets = [replace(b, slices=slices) if b is bucket else b for b in plan.buckets]
    return replace(plan, buckets=tuple(buckets))


def test_a_wrong_plan_that_all_ranks_agree_on_is_detected():
    shape = make_moe_shape(num_layers=1, ffn_hidden_size=8)
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    trainer_layouts = trainer_layouts_of(shape, tensor=2)
    rollout_layouts = engine_layouts(shape, 2)
    nodes = [RankLocation(0)] * 4
    plan = plan_transfer(
        trainer_layouts, rollout_layouts, nodes, "float32", names=list(shapes), bucket_bytes=3000
    )
    dtype_of, regions = types(names=shapes), collect_regions(rollout_layouts)
    digest_of = expected_digests(trainer_layouts, tensors, regions, dtype_of)

    def wrong_names(plan):
        received = execute_directly(plan, trainer_layouts, rollout_layouts, tensors)
        return {
            region.hf_name
            for layout, params in zip(rollout_layouts, received, strict=True)
            for region in wrong_regions(layout, params, digest_of, dtype_of)
        }

    assert wrong_names(plan) == set()
    spoiled = list(wrong_plans(plan))
    assert len(spoiled) > 20
    for wrong, slices in spoiled:
        assert wrong_names(wrong) == {tensor_slice.hf_name for tensor_slice in slices}


UPPER = ParamBlock("p", Rect((0, 0), (4, 6)), Rect((10, 2), (14, 8)))
LOWER = ParamBlock("p", Rect((4, 0), (8, 6)), Rect((0, 0), (4, 6)))
VALUES = torch.arange(48.0).reshape(8, 6)


class CopiedParameter:
    """A parameter `[8, 6]` and the accumulator of copies to it."""

    def __init__(self, *blocks, values=VALUES, dtype=torch.float32):
        self.accumulator, self.values = DigestAccumulator(blocks, to_frame=False), values
        self.parameter = torch.zeros(8, 6, dtype=dtype)
        self.frames = {}

    def copy(self, start, stop, plus=0):
        rect = Rect(start, stop)
        values = self.values[rect.slices]
        values = values + plus if plus else values
        if rect not in self.frames:  # as in a session, a batch is made once
            self.frames[rect] = frame_of({ParamSlice("p", rect): values})
        self.accumulator.copy(*self.frames[rect], {"p": self.parameter})

    def digest(self, index=0):
        if not self.accumulator.is_covered(index):
            return None
        return self.accumulator.digests()[index].tolist()


def digest_of_values(values, rect):
    return compute_digests([(values, rect)])[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_to_the_digest_of_their_block(dtype):
    values = VALUES.to(dtype)
    copied = CopiedParameter(UPPER, LOWER, values=values, dtype=dtype)
    copied.copy((0, 0), (1, 6))
    copied.copy((1, 0), (4, 2))
    assert copied.digest() is None, "half of it is missing"
    copied.copy((1, 2), (4, 6))
    assert torch.equal(copied.parameter[:4], values[:4])
    assert copied.digest(0) == digest_of_values(values[:4], UPPER.hf_rect)
    assert copied.digest(1) is None
    copied.accumulator.reset()
    assert copied.digest() is None


def test_a_block_that_is_written_twice_has_no_digest():
    copied = CopiedParameter(UPPER, LOWER)
    copied.copy((0, 0), (4, 6))
    copied.copy((3, 0), (4, 6), plus=1)
    assert copied.digest() is None
    assert torch.equal(copied.parameter[3], VALUES[3] + 1), "it is copied all the same"


def test_a_slice_over_two_blocks_leaves_neither_with_a_digest():
    copied = CopiedParameter(UPPER, LOWER)
    copied.copy((4, 0), (8, 6))
    copied.copy((3, 0), (5, 6))
    copied.copy((0, 0), (3, 6))
    assert copied.digest(0) is None and copied.digest(1) is None


def test_a_copy_that_converts_the_dtype_is_made_and_has_no_digest():
    copied = CopiedParameter(UPPER, dtype=torch.bfloat16)
    copied.copy((0, 0), (4, 6))
    assert torch.equal(copied.parameter[:4], VALUES[:4].bfloat16())
    assert copied.digest() is None


@given(
    rows=st.lists(st.integers(1, 7), max_size=3),
    columns=st.lists(st.integers(1, 5), max_size=2),
    at=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    seed=st.integers(0, 99),
)
def test_any_cut_gives_the_digest_of_the_whole(rows, columns, at, seed):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    hf_rect = Rect(at, (at[0] + 8, at[1] + 6))
    copied = CopiedParameter(ParamBlock("p", Rect((0, 0), (8, 6)), hf_rect), values=values)
    rows, columns = sorted({0, 8, *rows}), sorted({0, 6, *columns})
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            copied.copy((top, left), (bottom, right))
    assert torch.equal(copied.parameter, values)
    assert copied.digest() == digest_of_values(values, hf_rect)

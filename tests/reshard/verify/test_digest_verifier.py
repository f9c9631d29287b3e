"""What trainer ranks say of every region, added up, is what a rollout rank finds, unless
something is wrong: then it is named, even where all ranks agree on a wrong plan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.frames import FrameCodec, num_frame_bytes
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import HF_EMBEDDING, hf_shapes, megatron_layout
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.transfer_plan import ParamSlice
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.digest import compute_digests
from mega_agentrl.reshard.verify.digest_verifier import (
    DigestAccumulator,
    DigestRegion,
    DigestVerifier,
    ParamBlock,
    ReceivedDigests,
    RegionPart,
    SourceDigests,
    collect_regions,
    region_parts_of_layout,
    regions_of_layout,
)
from tests.reshard.fake_rollout import expected_of
from tests.reshard.faults import cut
from tests.reshard.model_cuts import (
    all_parallel_ranks,
    make_moe_shape,
    make_shape,
    models_and_ranks,
)
from tests.reshard.rollout_cuts import rollout_layout

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


def digests_by(layouts, tensors, regions, dtype_of, spoil=None):
    """What all trainer ranks say. spoil: shards by rank that are other than they should be."""
    digests = []
    for rank, layout in enumerate(layouts):
        shards = (spoil or {}).get(rank) or cut(layout, tensors)
        digests.append(SourceDigests(layout, regions, dtype_of).compute(shards.__getitem__))
    return digests


def judged(layouts, tensors, regions, dtype_of, spoil=None):
    """Digest by region."""
    digests = DigestVerifier(layouts, regions).expected_digests(
        digests_by(layouts, tensors, regions, dtype_of, spoil)
    )
    return {region: tuple(map(int, row)) for region, row in zip(regions, digests, strict=True)}


def found_by(layout, params, dtype_of):
    regions = ReceivedDigests(layout, dtype_of)
    regions.compute((s, params[s.name]) for s in layout)
    return regions


def wrong_regions(layout, params, digest_of, dtype_of):
    regions = found_by(layout, params, dtype_of)
    return regions.find_mismatches(expected_of(regions.regions, digest_of))


def test_regions_and_parts_by_hand():
    target_layout = [*held(rows(0, 6)), shard("again", rows(0, 6), shape=(6, 4)), *held(rows(6, 8))]
    first, second = (DigestRegion("w", Rect((a, 0), (b, 4))) for a, b in ((0, 6), (6, 8)))
    assert regions_of_layout(target_layout) == [first, second]
    assert collect_regions([held(rows(6, 8)), target_layout]) == [first, second]
    assert region_parts_of_layout(held(rows(4, 8)), [first, second]) == [
        RegionPart(0, Rect((4, 0), (6, 4))),
        RegionPart(1, Rect((6, 0), (8, 4))),
    ]
    assert (
        region_parts_of_layout([shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))], [first])
        == []
    )


def test_parts_add_up_to_the_digest_of_the_region():
    # Ranks cut `w` at row 3, replicas included; the regions do at row 5.
    trainer_layouts = [held(rows(0, 3)), held(rows(3, 8)), held(rows(0, 3)), held(rows(3, 8))]
    regions = collect_regions([held(rows(0, 5)), held(rows(5, 8))])
    digest_of = judged(trainer_layouts, TENSORS, regions, types())
    for region in regions:
        values = TENSORS["w"][region.rect.slices]
        assert list(digest_of[region]) == compute_digests([(values, region.rect)])[0].tolist()
    assert expected_of(regions[::-1], digest_of).tolist() == [
        list(digest_of[region]) for region in regions[::-1]
    ]
    assert expected_of([], digest_of).shape == (0, 2)


@settings(max_examples=25)
@given(
    models_and_ranks(),
    st.sampled_from([1, 2]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_what_a_rollout_rank_finds_is_what_is_expected(model, rollout, dtype):
    """Any model, any cut: tied embeddings, replicas, experts, repeated heads."""
    shape, parallel_ranks = model
    if any(
        n % rollout
        for n in (
            shape.num_heads,
            shape.ffn_hidden_size,
            shape.moe.ffn_hidden_size if shape.moe else 0,
        )
    ):
        rollout = 1
    if shape.num_kv_heads % rollout and rollout % shape.num_kv_heads:
        rollout = 1
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    trainer_layouts = [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks]
    rollout_layouts = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    dtype_of = types(dtype, shapes)
    digest_of = judged(trainer_layouts, tensors, collect_regions(rollout_layouts), dtype_of)
    for target_layout in rollout_layouts:
        params = {n: p.to(getattr(torch, dtype)) for n, p in cut(target_layout, tensors).items()}
        assert wrong_regions(target_layout, params, digest_of, dtype_of) == []


def tied_model():
    shape = make_shape(num_layers=2, tie_word_embeddings=True)
    tensors = {name: torch.randn(size) for name, size in hf_shapes(shape).items()}
    trainer_layouts = [
        megatron_layout(shape, parallel_rank)
        for parallel_rank in all_parallel_ranks(tensor=2, pipeline=2, data=2)
    ]
    return shape, tensors, trainer_layouts, [rollout_layout(shape, rank, 2) for rank in range(2)]


def test_replicas_that_differ_are_named():
    shape, tensors, trainer_layouts, rollout_layouts = tied_model()
    regions, dtype_of = collect_regions(rollout_layouts), types(names=hf_shapes(shape))
    for rank, other, name in [
        (3, 1, "decoder.layers.0.self_attention.linear_qkv.weight"),
        (4, 0, "output_layer.weight"),  # the embedding's copy on the last stage
    ]:
        shards = cut(trainer_layouts[rank], tensors)
        shards[name][0, 0] += 1
        with pytest.raises(ValueError, match=rf"trainer ranks {other} and {rank} hold") as caught:
            judged(trainer_layouts, tensors, regions, dtype_of, {rank: shards})
        assert "replicas that have drifted apart" in str(caught.value)
        expected = HF_EMBEDDING if "output" in name else "model.layers.0.self_attn."
        assert f"verification of {expected}" in str(caught.value)


def test_a_region_that_nobody_holds_completely_is_named():
    regions = collect_regions([held(rows(0, 8))])
    with pytest.raises(
        ValueError, match=r"verification of w Rect.* hold 28 elements of it, expected 32"
    ):
        DigestVerifier([held(rows(0, 3)), held(rows(4, 8))], regions)
    with pytest.raises(ValueError, match=r"hold 0 elements of it, expected 32"):
        DigestVerifier([[shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))]], regions)


def test_ranks_that_are_cut_differently_are_no_replicas():
    # Rows 0-4 and 3-8: two rows are in two cells that are not the same.
    with pytest.raises(ValueError, match=r"hold 40 elements of it.*sharded differently"):
        DigestVerifier([held(rows(0, 5)), held(rows(3, 8))], collect_regions([held(rows(0, 8))]))


TWICE = [shard("one", rows(0, 4), shape=(4, 4)), shard("two", rows(0, 4, at=1), shape=(5, 4))]


def test_a_region_in_two_places_must_be_the_same_in_both():
    params = cut(TWICE, TENSORS)
    assert found_by(TWICE, params, types()).regions == [DigestRegion("w", Rect((0, 0), (4, 4)))]
    params["two"][2, 3] += 1
    with pytest.raises(ValueError, match=r"w Rect.*is held twice by this rank, with different"):
        found_by(TWICE, params, types())


def test_unseen_regions_are_mismatches():
    layout = [*held(rows(0, 4)), shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))]
    regions = ReceivedDigests(layout, types())
    params = cut(layout, TENSORS)
    expected = expected_of(regions.regions, judged([layout], TENSORS, regions.regions, types()))
    assert regions.find_mismatches(expected) == regions.regions
    regions.compute([(layout[1], params["v"])])
    assert regions.find_mismatches(expected) == [DigestRegion("w", Rect((0, 0), (4, 4)))]
    regions.compute([(layout[0], params["p"])])
    assert regions.find_mismatches(expected) == []
    regions.reset()
    assert regions.find_mismatches(expected) == regions.regions
    # Zeros have the digest zero: what was never seen is wrong all the same.
    assert regions.find_mismatches(np.zeros_like(expected)) == regions.regions


def test_padding_does_not_count():
    params = {"p": torch.full((8, 4), 5.0)}
    params["p"][2:4] = TENSORS["w"][:2]
    layout = held(rows(0, 2, at=2))
    digest_of = judged([held(rows(0, 8))], TENSORS, regions_of_layout(layout), types())
    assert wrong_regions(layout, params, digest_of, types()) == []


def carried_out(plan, trainer_layouts, rollout_layouts, tensors):
    """Parameters of all rollout ranks after frames went straight from the first holder."""
    received = [
        {s.name: torch.zeros(s.shape) for s in target_layout} for target_layout in rollout_layouts
    ]
    for bucket in plan.buckets:
        root = bucket.hops[0].source
        slot = torch.empty(num_frame_bytes(bucket), dtype=torch.uint8)
        frame = FrameCodec(plan, trainer_layouts[root]).write(
            bucket, slot, cut(trainer_layouts[root], tensors), 1
        )
        for target in {hop.target for hop in bucket.hops}:
            target_layout = target - plan.num_trainer_ranks
            for param_slice, values in FrameCodec(plan, rollout_layouts[target_layout]).read(
                bucket, frame
            ):
                received[target_layout][param_slice.param][param_slice.rect.slices] = values
    return received


def wrong_plans(plan):
    """Plans that every rank can carry out and that bring something else than they should."""
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


def test_a_wrong_plan_that_all_ranks_agree_on_is_caught():
    shape = make_moe_shape(num_layers=1, ffn_hidden_size=8)
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    trainer_layouts = [
        megatron_layout(shape, parallel_rank) for parallel_rank in all_parallel_ranks(tensor=2)
    ]
    rollout_layouts = [rollout_layout(shape, rank, 2) for rank in range(2)]
    nodes = [RankLocation(0)] * 4
    plan = plan_transfer(
        trainer_layouts, rollout_layouts, nodes, "float32", names=list(shapes), bucket_bytes=3000
    )
    dtype_of = types(names=shapes)
    digest_of = judged(trainer_layouts, tensors, collect_regions(rollout_layouts), dtype_of)

    def wrong_names(plan):
        received = carried_out(plan, trainer_layouts, rollout_layouts, tensors)
        wrong = [
            wrong_regions(target_layout, params, digest_of, dtype_of)
            for target_layout, params in zip(rollout_layouts, received, strict=True)
        ]
        return {region.hf_name for regions in wrong for region in regions}

    assert wrong_names(plan) == set()
    spoiled = list(wrong_plans(plan))
    assert len(spoiled) > 20
    for wrong, slices in spoiled:
        assert wrong_names(wrong) == {tensor_slice.hf_name for tensor_slice in slices}


UPPER = ParamBlock("p", Rect((0, 0), (4, 6)), Rect((10, 2), (14, 8)))
LOWER = ParamBlock("p", Rect((4, 0), (8, 6)), Rect((0, 0), (4, 6)))


def filled(dtype=torch.float32):
    return torch.arange(48, dtype=torch.float32).reshape(8, 6).to(dtype)


def put(accumulator, parameter, values, start, stop):
    rect = Rect(start, stop)
    accumulator.copy(ParamSlice("p", rect), parameter[rect.slices], values[rect.slices])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_to_the_digest_of_what_is_there(dtype):
    accumulator, parameter, values = (
        DigestAccumulator([UPPER, LOWER]),
        torch.zeros(8, 6, dtype=dtype),
        filled(dtype),
    )
    put(accumulator, parameter, values, (0, 0), (1, 6))
    put(accumulator, parameter, values, (1, 0), (4, 2))
    assert accumulator.digest_of_block(0) is None, "half of it is missing"
    put(accumulator, parameter, values, (1, 2), (4, 6))
    assert torch.equal(parameter[:4], values[:4])
    assert (
        accumulator.digest_of_block(0) == compute_digests([(values[:4], UPPER.hf_rect)])[0]
    ).all()
    assert accumulator.digest_of_block(1) is None
    accumulator.reset()
    assert accumulator.digest_of_block(0) is None


def test_what_is_written_twice_has_no_digest():
    accumulator, parameter, values = DigestAccumulator([UPPER, LOWER]), torch.zeros(8, 6), filled()
    put(accumulator, parameter, values, (0, 0), (4, 6))
    put(accumulator, parameter, values + 1, (3, 0), (4, 6))
    assert accumulator.digest_of_block(0) is None
    assert torch.equal(parameter[3], values[3] + 1), "it is copied all the same"


def test_what_reaches_over_two_spans_spoils_both():
    accumulator, parameter, values = DigestAccumulator([UPPER, LOWER]), torch.zeros(8, 6), filled()
    put(accumulator, parameter, values, (4, 0), (8, 6))
    put(accumulator, parameter, values, (3, 0), (5, 6))
    put(accumulator, parameter, values, (0, 0), (3, 6))
    assert accumulator.digest_of_block(0) is None and accumulator.digest_of_block(1) is None


def test_a_copy_that_changes_the_type_is_made_and_not_counted():
    accumulator, parameter, values = (
        DigestAccumulator([UPPER]),
        torch.zeros(8, 6, dtype=torch.bfloat16),
        filled(),
    )
    put(accumulator, parameter, values, (0, 0), (4, 6))
    assert (
        torch.equal(parameter[:4], values[:4].bfloat16()) and accumulator.digest_of_block(0) is None
    )


def test_an_expert_is_one_slice_of_a_stack():
    span = ParamBlock("p", Rect((1, 0, 0), (2, 4, 6)), Rect((0, 0), (4, 6)))
    accumulator, parameter = DigestAccumulator([span]), torch.zeros(3, 4, 6)
    values = filled()[:4]
    accumulator.copy(ParamSlice("p", span.local_rect), parameter[span.local_rect.slices], values)
    assert torch.equal(parameter[1], values)
    assert (accumulator.digest_of_block(0) == compute_digests([(values, span.hf_rect)])[0]).all()


@given(
    rows=st.lists(st.integers(1, 7), max_size=3),
    columns=st.lists(st.integers(1, 5), max_size=2),
    at=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    seed=st.integers(0, 99),
)
def test_any_cut_gives_the_digest_of_the_whole(rows, columns, at, seed):
    values = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    hf_rect = Rect(at, (at[0] + 8, at[1] + 6))
    accumulator, parameter = (
        DigestAccumulator([ParamBlock("p", Rect((0, 0), (8, 6)), hf_rect)]),
        torch.zeros(8, 6),
    )
    rows, columns = sorted({0, 8, *rows}), sorted({0, 6, *columns})
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            put(accumulator, parameter, values, (top, left), (bottom, right))
    assert (accumulator.digest_of_block(0) == compute_digests([(values, hf_rect)])[0]).all()

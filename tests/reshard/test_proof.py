"""What trainer ranks say of every region, added up, is what a rollout rank finds, unless
something is wrong: then it is named, even where all ranks agree on a wrong plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.digest import digests
from mega_agentrl.reshard.frames import Frames, frame_bytes
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.links import Location
from mega_agentrl.reshard.names import EMBEDDING, hf_shapes, megatron_layout
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.proof import (
    Cell,
    Court,
    Region,
    Regions,
    Witness,
    all_regions,
    cells_of,
    regions_of,
)
from tests.reshard.fake_rollout import expected_of
from tests.reshard.faults import cut
from tests.reshard.model_cuts import all_places, make_moe_shape, make_shape, models_and_places
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


def said_by(layouts, tensors, regions, dtype_of, spoil=None):
    """What all trainer ranks say. spoil: shards by rank that are other than they should be."""
    said = []
    for rank, layout in enumerate(layouts):
        shards = (spoil or {}).get(rank) or cut(layout, tensors)
        said.append(Witness(layout, regions, dtype_of).testify(shards.__getitem__))
    return said


def judged(layouts, tensors, regions, dtype_of, spoil=None):
    """Digest by region."""
    digests = Court(layouts, regions).expected(said_by(layouts, tensors, regions, dtype_of, spoil))
    return {region: tuple(map(int, row)) for region, row in zip(regions, digests, strict=True)}


def found_by(layout, params, dtype_of):
    regions = Regions(layout, dtype_of)
    regions.take((s, params[s.name]) for s in layout)
    return regions


def wrong_regions(layout, params, digest_of, dtype_of):
    regions = found_by(layout, params, dtype_of)
    return regions.mismatches(expected_of(regions.regions, digest_of))


def test_regions_and_cells_by_hand():
    sink = [*held(rows(0, 6)), shard("again", rows(0, 6), shape=(6, 4)), *held(rows(6, 8))]
    first, second = (Region("w", Rect((a, 0), (b, 4))) for a, b in ((0, 6), (6, 8)))
    assert regions_of(sink) == [first, second]
    assert all_regions([held(rows(6, 8)), sink]) == [first, second]
    assert cells_of(held(rows(4, 8)), [first, second]) == [
        Cell(0, Rect((4, 0), (6, 4))),
        Cell(1, Rect((6, 0), (8, 4))),
    ]
    assert cells_of([shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))], [first]) == []


def test_cells_add_up_to_the_digest_of_the_region():
    # Ranks cut `w` at row 3, replicas included; the regions do at row 5.
    sources = [held(rows(0, 3)), held(rows(3, 8)), held(rows(0, 3)), held(rows(3, 8))]
    regions = all_regions([held(rows(0, 5)), held(rows(5, 8))])
    digest_of = judged(sources, TENSORS, regions, types())
    for region in regions:
        values = TENSORS["w"][region.rect.slices]
        assert list(digest_of[region]) == digests([(values, region.rect)])[0].tolist()
    assert expected_of(regions[::-1], digest_of).tolist() == [
        list(digest_of[region]) for region in regions[::-1]
    ]
    assert expected_of([], digest_of).shape == (0, 2)


@settings(max_examples=25)
@given(
    models_and_places(),
    st.sampled_from([1, 2]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_what_a_rollout_rank_finds_is_what_is_expected(model, rollout, dtype):
    """Any model, any cut: tied embeddings, replicas, experts, repeated heads."""
    shape, places = model
    if any(n % rollout for n in (shape.num_heads, shape.ffn, shape.moe.ffn if shape.moe else 0)):
        rollout = 1
    if shape.num_kv_heads % rollout and rollout % shape.num_kv_heads:
        rollout = 1
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    sources = [megatron_layout(shape, place) for place in places]
    sinks = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    dtype_of = types(dtype, shapes)
    digest_of = judged(sources, tensors, all_regions(sinks), dtype_of)
    for sink in sinks:
        params = {n: p.to(getattr(torch, dtype)) for n, p in cut(sink, tensors).items()}
        assert wrong_regions(sink, params, digest_of, dtype_of) == []


def tied_model():
    shape = make_shape(num_layers=2, tied=True)
    tensors = {name: torch.randn(size) for name, size in hf_shapes(shape).items()}
    sources = [megatron_layout(shape, place) for place in all_places(tensor=2, pipeline=2, data=2)]
    return shape, tensors, sources, [rollout_layout(shape, rank, 2) for rank in range(2)]


def test_replicas_that_differ_are_named():
    shape, tensors, sources, sinks = tied_model()
    regions, dtype_of = all_regions(sinks), types(names=hf_shapes(shape))
    for rank, other, name in [
        (3, 1, "decoder.layers.0.self_attention.linear_qkv.weight"),
        (4, 0, "output_layer.weight"),  # the embedding's copy on the last stage
    ]:
        shards = cut(sources[rank], tensors)
        shards[name][0, 0] += 1
        with pytest.raises(ValueError, match=rf"trainer ranks {other} and {rank} should") as caught:
            judged(sources, tensors, regions, dtype_of, {rank: shards})
        assert "replicas that have drifted apart" in str(caught.value)
        expected = EMBEDDING if "output" in name else "model.layers.0.self_attn."
        assert f"proof of {expected}" in str(caught.value)


def test_a_region_that_nobody_holds_completely_is_named():
    regions = all_regions([held(rows(0, 8))])
    with pytest.raises(ValueError, match=r"proof of w Rect.* hold 28 elements of it, expected 32"):
        Court([held(rows(0, 3)), held(rows(4, 8))], regions)
    with pytest.raises(ValueError, match=r"hold 0 elements of it, expected 32"):
        Court([[shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))]], regions)


def test_ranks_that_are_cut_differently_are_no_replicas():
    # Rows 0-4 and 3-8: two rows are in two cells that are not the same.
    with pytest.raises(ValueError, match=r"hold 40 elements of it.*cut differently"):
        Court([held(rows(0, 5)), held(rows(3, 8))], all_regions([held(rows(0, 8))]))


TWICE = [shard("one", rows(0, 4), shape=(4, 4)), shard("two", rows(0, 4, at=1), shape=(5, 4))]


def test_a_region_in_two_places_must_be_the_same_in_both():
    params = cut(TWICE, TENSORS)
    assert found_by(TWICE, params, types()).regions == [Region("w", Rect((0, 0), (4, 4)))]
    params["two"][2, 3] += 1
    with pytest.raises(ValueError, match=r"w Rect.*is held twice by this rank, and differently"):
        found_by(TWICE, params, types())


def test_unseen_regions_are_mismatches():
    layout = [*held(rows(0, 4)), shard("v", ("v", *2 * [Rect((0,), (6,))]), shape=(6,))]
    regions = Regions(layout, types())
    params = cut(layout, TENSORS)
    expected = expected_of(regions.regions, judged([layout], TENSORS, regions.regions, types()))
    assert regions.mismatches(expected) == regions.regions
    regions.take([(layout[1], params["v"])])
    assert regions.mismatches(expected) == [Region("w", Rect((0, 0), (4, 4)))]
    regions.take([(layout[0], params["p"])])
    assert regions.mismatches(expected) == []
    regions.clear()
    assert regions.mismatches(expected) == regions.regions
    # Zeros have the digest zero: what was never seen is wrong all the same.
    assert regions.mismatches(np.zeros_like(expected)) == regions.regions


def test_padding_does_not_count():
    params = {"p": torch.full((8, 4), 5.0)}
    params["p"][2:4] = TENSORS["w"][:2]
    layout = held(rows(0, 2, at=2))
    digest_of = judged([held(rows(0, 8))], TENSORS, regions_of(layout), types())
    assert wrong_regions(layout, params, digest_of, types()) == []


def carried_out(plan, sources, sinks, tensors):
    """Parameters of all rollout ranks after frames went straight from the first holder."""
    received = [{s.name: torch.zeros(s.shape) for s in sink} for sink in sinks]
    for bucket in plan.buckets:
        root = bucket.hops[0].source
        slot = torch.empty(frame_bytes(bucket), dtype=torch.uint8)
        frame = Frames(plan, sources[root]).write(bucket, slot, cut(sources[root], tensors), 1)
        for target in {hop.target for hop in bucket.hops}:
            sink = target - plan.num_sources
            for place, values in Frames(plan, sinks[sink]).read(bucket, frame):
                received[sink][place.param][place.rect.slices] = values
    return received


def wrong_plans(plan):
    """Plans that every rank can carry out and that bring something else than they should."""
    for bucket in plan.buckets:
        pieces = bucket.pieces
        yield replace(plan, buckets=tuple(b for b in plan.buckets if b is not bucket)), pieces
        for one, piece in enumerate(pieces):
            twins = [p for p in pieces if p.rect.shape == piece.rect.shape and p != piece]
            if twins:  # one is sent twice, the other never
                spoiled = (*pieces[:one], twins[0], *pieces[one + 1 :])
                yield _with(plan, bucket, spoiled), (piece,)


def _with(plan, bucket, pieces):
    buckets = [replace(b, pieces=pieces) if b is bucket else b for b in plan.buckets]
    return replace(plan, buckets=tuple(buckets))


def test_a_wrong_plan_that_all_ranks_agree_on_is_caught():
    shape = make_moe_shape(num_layers=1, ffn=8)
    shapes = hf_shapes(shape)
    tensors = {name: torch.randn(size) for name, size in shapes.items()}
    sources = [megatron_layout(shape, place) for place in all_places(tensor=2)]
    sinks = [rollout_layout(shape, rank, 2) for rank in range(2)]
    nodes = [Location(0)] * 4
    plan = plan_delivery(sources, sinks, nodes, "float32", names=list(shapes), bucket_bytes=3000)
    dtype_of = types(names=shapes)
    digest_of = judged(sources, tensors, all_regions(sinks), dtype_of)

    def wrong_names(plan):
        received = carried_out(plan, sources, sinks, tensors)
        wrong = [
            wrong_regions(sink, params, digest_of, dtype_of)
            for sink, params in zip(sinks, received, strict=True)
        ]
        return {region.hf_name for regions in wrong for region in regions}

    assert wrong_names(plan) == set()
    spoiled = list(wrong_plans(plan))
    assert len(spoiled) > 20
    for wrong, pieces in spoiled:
        assert wrong_names(wrong) == {piece.hf_name for piece in pieces}

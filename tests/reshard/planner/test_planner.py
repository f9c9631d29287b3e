"""Whole plans, executed in memory: every shard right, own bytes only, the network's lower bound.

The grid is source (tensor, pipeline, expert) to rollout tensor size, for dense models and
models with experts, apart, colocated, and several engines; then random small shapes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.planner.planner import check_transfer_plan, plan_transfer
from mega_agentrl.reshard.planner.traffic import count_traffic
from mega_agentrl.reshard.planner.transfer_plan import Hop
from mega_agentrl.reshard.topology import LinkType, RankLocation
from tests.reshard.model_cuts import (
    make_moe_shape,
    make_shape,
    models_and_ranks,
    trainer_layouts_of,
    widened,
)
from tests.reshard.numpy_transfer import execute, filled, make_tensors, network_bound, own_bytes
from tests.reshard.planner.test_regions import layout, rows
from tests.reshard.rollout_cuts import engine_layouts

FLOAT_BYTES = 4
GRID = list(itertools.product([1, 2, 4], [1, 2], [1, 2], [1, 2, 4]))


def apart(num_trainer_ranks, num_rollout_ranks, per_node=2):
    """Trainer ranks on machines of their own."""
    first = -(-num_trainer_ranks // per_node)
    rollout = [(first + rank // per_node, rank % per_node) for rank in range(num_rollout_ranks)]
    return colocated(num_trainer_ranks, 0, per_node) + [RankLocation(*at) for at in rollout]


def colocated(num_trainer_ranks, num_rollout_ranks, per_node=2):
    """Rollout rank n on the device of trainer rank n."""
    ranks = (*range(num_trainer_ranks), *range(num_rollout_ranks))
    return [RankLocation(rank // per_node, rank % per_node) for rank in ranks]


def check_all(shape, trainer_layouts, rollout_layouts, locations, **options):
    """The plan, after all that must hold for any plan."""
    shapes = hf_shapes(shape)
    plan = plan_transfer(
        trainer_layouts, rollout_layouts, locations, "float32", names=list(shapes), **options
    )
    tensors = make_tensors(shapes)
    received = execute(plan, trainer_layouts, rollout_layouts, tensors)
    for shards, params in zip(rollout_layouts, received, strict=True):
        for name, expected in filled(shards, tensors).items():
            assert np.array_equal(params[name], expected), name
    traffic = count_traffic(plan, locations)
    for rank, shards in zip(plan.rollout_ranks, rollout_layouts, strict=True):
        assert traffic.received_bytes_of(rank) == own_bytes(shards, FLOAT_BYTES)
    bound = network_bound(trainer_layouts, rollout_layouts, locations, shapes, FLOAT_BYTES)
    assert traffic.total_bytes(LinkType.network) == plan.min_network_bytes == bound
    return plan, traffic


@pytest.mark.parametrize("locate", [apart, colocated])
@pytest.mark.parametrize(("tensor", "pipeline", "expert", "rollout"), GRID)
def test_every_layout_with_experts_has_a_right_plan(tensor, pipeline, expert, rollout, locate):
    shape = make_moe_shape(
        num_layers=2,
        moe_layer_pattern=[True, False],
        num_experts=4,
        ffn_hidden_size=8,
        tie_word_embeddings=False,
    )
    trainer_layouts = trainer_layouts_of(
        shape, tensor=tensor, pipeline=pipeline, data=max(1, expert // tensor), expert=expert
    )
    locations = locate(len(trainer_layouts), rollout)
    check_all(shape, trainer_layouts, engine_layouts(shape, rollout), locations, bucket_bytes=1000)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "rollout"), list(itertools.product([1, 2, 4], [1, 2], [1, 2, 4]))
)
def test_every_dense_layout_has_a_right_plan_for_several_engines(
    tensor, pipeline, rollout, engines
):
    shape = make_shape(num_layers=2, num_kv_heads=2, qkv_bias=True)
    trainer_layouts = trainer_layouts_of(shape, tensor=tensor, pipeline=pipeline, data=2)
    rollout_layouts = engine_layouts(shape, rollout) * engines
    locations = apart(len(trainer_layouts), len(rollout_layouts))
    plan, traffic = check_all(shape, trainer_layouts, rollout_layouts, locations)
    # The trainer sends every byte once, whatever the number of engines and repeated heads.
    total = FLOAT_BYTES * sum(int(np.prod(s)) for s in hf_shapes(shape).values())
    assert traffic.trainer_sent_bytes() == total
    again = plan_transfer(
        trainer_layouts, rollout_layouts, locations, "float32", names=list(hf_shapes(shape))
    )
    assert plan == again


def test_engines_of_different_sizes_are_served_by_one_plan():
    shape = make_moe_shape(num_layers=2, ffn_hidden_size=8)
    trainer_layouts = trainer_layouts_of(shape, tensor=2, pipeline=2)
    rollout_layouts = engine_layouts(shape, 4) + engine_layouts(shape, 1)
    check_all(shape, trainer_layouts, rollout_layouts, apart(4, 5), bucket_bytes=500)


def test_a_colocated_replica_copies_all_that_its_device_holds():
    shape = make_shape(num_layers=2)
    trainer_layouts = trainer_layouts_of(shape, data=4)
    rollout_layouts = engine_layouts(shape, 2) * 2
    _, traffic = check_all(shape, trainer_layouts, rollout_layouts, colocated(4, 4))
    assert traffic.total_bytes(LinkType.network) == traffic.total_bytes(LinkType.same_node) == 0
    assert traffic.trainer_sent_bytes() == 0


@settings(deadline=None, max_examples=25)
@given(
    models_and_ranks(),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([colocated, apart]),
    st.integers(1, 3000),
)
def test_plans_for_random_shapes_bring_every_element(
    model, rollout, engines, per_node, locate, bucket_bytes
):
    shape, parallel_ranks = model
    shape = widened(shape, rollout)
    trainer_layouts = [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks]
    rollout_layouts = engine_layouts(shape, rollout) * engines
    locations = locate(len(trainer_layouts), len(rollout_layouts), per_node)
    check_all(shape, trainer_layouts, rollout_layouts, locations, bucket_bytes=bucket_bytes)


def part(name, start, stop, *, at=0):
    """A shard of one column: rows [start, stop) of `name` at row `at`."""
    block = Block(name, Rect((start,), (stop,)), Rect((at,), (at + stop - start,)))
    return ShardLayout(f"p.{name}", (at + stop - start,), (block,))


WHOLE = [part("w", 0, 8)]
# Both blocks of one parameter hold its row 3.
TWICE = [ShardLayout("p", (8,), (*part("w", 0, 4).blocks, *part("w", 4, 8, at=3).blocks))]
NODES = [RankLocation(0), RankLocation(1)]
WRONG_TENSORS = {"missing": "[w]", "unknown": "[v]"}


@pytest.mark.parametrize(
    ("trainer", "rollout", "options", "name", "got"),
    [
        ([part("w", 0, 4)], WHOLE, {}, f"trainer ranks with w {Rect((4,), (8,))}", "none"),
        ([part("v", 0, 8)], WHOLE, {}, "tensors that trainer ranks hold", WRONG_TENSORS),
        (WHOLE, [part("v", 0, 8)], {}, "tensors that rollout ranks need", WRONG_TENSORS),
        (WHOLE, TWICE, {}, "a rollout rank, blocks of p", (Rect((0,), (4,)), Rect((3,), (7,)))),
        (WHOLE, WHOLE, {"dtypes": "int8"}, "dtype of w", "int8"),
        (WHOLE, WHOLE, {"locations": [*NODES, RankLocation(2)]}, "number of locations", 3),
        (WHOLE, WHOLE, {"bucket_bytes": 0}, "bucket_bytes", 0),
    ],
    ids=["hole", "not-held", "not-needed", "written-twice", "dtype", "locations", "bucket-size"],
)
def test_a_plan_that_cannot_be_made_names_what_is_wrong(trainer, rollout, options, name, got):
    arguments = {"locations": NODES, "dtypes": "float32", "names": ["w"]} | options
    with pytest.raises(InputError) as caught:
        plan_transfer([trainer], [rollout], **arguments)
    assert name in caught.value.name
    assert caught.value.got == got


TRAINER_LAYOUTS = [layout(rows(0, 4)), layout(rows(4, 8))]
ROLLOUT_LAYOUTS = [layout(rows(0, 8)), layout(rows(0, 2))]
PLAN = plan_transfer(
    TRAINER_LAYOUTS, ROLLOUT_LAYOUTS, [RankLocation(n) for n in range(4)], "float32", names=["w"]
)  # buckets: rows 0-1 to both rollout ranks, rows 2-3 and rows 4-7 to the first


def with_bucket(bucket, **changes):
    """The plan with one bucket changed."""
    changed = replace(bucket, **changes)
    return replace(PLAN, buckets=tuple(changed if b is bucket else b for b in PLAN.buckets))


FIRST, SECOND, THIRD = (
    next(b for b in PLAN.buckets if b.slices[0].rect == rect)
    for rect in (rows(0, 2), rows(2, 4), rows(4, 8))
)


def moved(bucket, rect):
    return (bucket.slices[0]._replace(rect=rect),)


def test_a_right_plan_passes_the_check():
    assert len(PLAN.buckets) == 3
    check_transfer_plan(PLAN, TRAINER_LAYOUTS, ROLLOUT_LAYOUTS)


@pytest.mark.parametrize(
    ("plan", "name", "got"),
    [
        (
            replace(PLAN, buckets=tuple(b for b in PLAN.buckets if b is not SECOND)),
            f"rollout rank 2, elements of w {rows(0, 8)} that do not arrive",
            8,
        ),
        (
            replace(PLAN, buckets=(*PLAN.buckets, replace(FIRST, hops=(Hop(0, 3),)))),
            "rollout rank 3, blocks of w",
            (rows(0, 2), rows(0, 2)),
        ),
        (
            with_bucket(SECOND, slices=moved(SECOND, rows(1, 3))),
            "rollout rank 2, blocks of w",
            (rows(0, 2), rows(1, 3)),
        ),
        (
            with_bucket(THIRD, slices=moved(THIRD, rows(3, 8))),
            f"blocks of this rank with w {rows(3, 8)}",
            0,
        ),
        (
            with_bucket(THIRD, hops=(Hop(0, 2),)),
            f"blocks of this rank with w {rows(4, 8)}",
            0,
        ),
        (
            with_bucket(SECOND, hops=(Hop(0, 2), Hop(2, 3))),
            "rollout rank 3, received w",
            rows(2, 4),
        ),
        (with_bucket(SECOND, hops=(Hop(0, 2), Hop(2, 2))), "target of bucket", 2),
        (with_bucket(SECOND, hops=(Hop(3, 2),)), "source of bucket", 3),
        (with_bucket(SECOND, hops=(Hop(0, 1),)), "target of bucket", 1),
    ],
    ids=[
        *("lost", "sent-again", "shifted", "across-holders", "other-source"),
        *("other-target", "to-itself", "early-forward", "to-a-trainer"),
    ],
)
def test_a_wrong_plan_is_refused(plan, name, got):
    with pytest.raises(InputError) as caught:
        check_transfer_plan(plan, TRAINER_LAYOUTS, ROLLOUT_LAYOUTS)
    assert name in caught.value.name
    assert caught.value.got == got


def test_ranks_that_share_a_layout_are_told_apart_by_what_they_receive():
    shared = [layout(rows(0, 8))] * 2
    locations = [RankLocation(n) for n in range(4)]
    plan = plan_transfer(TRAINER_LAYOUTS, shared, locations, "float32", names=["w"])
    *others, last = plan.buckets
    plan = replace(plan, buckets=(*others, replace(last, hops=last.hops[:1])))
    with pytest.raises(InputError) as caught:
        check_transfer_plan(plan, TRAINER_LAYOUTS, shared)
    assert "rollout rank 3, elements of w" in caught.value.name
    assert caught.value.got == 16

"""Whole plans, executed in memory: every shard right, own bytes only, the network's lower bound.

The grid is source (tensor, pipeline, expert) to rollout tensor size, for dense models and
models with experts, apart, colocated, and several engines; then random small shapes.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.planner.planner import check_transfer_plan, plan_transfer
from mega_agentrl.reshard.planner.traffic import count_traffic
from mega_agentrl.reshard.planner.transfer_plan import Hop
from mega_agentrl.reshard.topology import LinkType, RankLocation
from tests.reshard.model_cuts import (
    all_parallel_ranks,
    make_moe_shape,
    make_shape,
    models_and_ranks,
)
from tests.reshard.numpy_transfer import (
    execute,
    filled,
    make_tensors,
    network_bound,
    own_bytes,
)
from tests.reshard.planner.test_regions import layout, rows
from tests.reshard.rollout_cuts import rollout_layout

FLOAT_BYTES = 4
GRID = list(itertools.product([1, 2, 4], [1, 2], [1, 2], [1, 2, 4]))


def apart(num_sources, num_sinks, per_node=2):
    """Trainer ranks on machines of their own."""
    first = -(-num_sources // per_node)
    return [RankLocation(rank // per_node, rank % per_node) for rank in range(num_sources)] + [
        RankLocation(first + rank // per_node, rank % per_node) for rank in range(num_sinks)
    ]


def colocated(num_sources, num_sinks, per_node=2):
    """Rollout rank n on the device of trainer rank n."""
    return [RankLocation(rank // per_node, rank % per_node) for rank in range(num_sources)] + [
        RankLocation(rank // per_node, rank % per_node) for rank in range(num_sinks)
    ]


def check_all(shape, trainer_layouts, rollout_layouts, locations, **options):
    """The plan, after all that must hold for any plan."""
    shapes = hf_shapes(shape)
    plan = plan_transfer(
        trainer_layouts, rollout_layouts, locations, "float32", names=list(shapes), **options
    )
    tensors = make_tensors(shapes)
    for shards, got in zip(
        rollout_layouts, execute(plan, trainer_layouts, rollout_layouts, tensors), strict=True
    ):
        for name, expected in filled(shards, tensors).items():
            assert np.array_equal(got[name], expected), name
    traffic = count_traffic(plan, locations)
    for rank, shards in zip(plan.rollout_ranks, rollout_layouts, strict=True):
        assert traffic.received_bytes_of(rank) == own_bytes(shards, FLOAT_BYTES)
    bound = network_bound(trainer_layouts, rollout_layouts, locations, shapes, FLOAT_BYTES)
    assert traffic.total_bytes(LinkType.network) == plan.min_network_bytes == bound
    return plan, traffic


@pytest.mark.parametrize("locate", [apart, colocated])
@pytest.mark.parametrize(("tensor", "pipeline", "expert", "rollout"), GRID)
def test_grid_with_experts(tensor, pipeline, expert, rollout, locate):
    shape = make_moe_shape(
        num_layers=2,
        moe_layer_pattern=[True, False],
        num_experts=4,
        ffn_hidden_size=8,
        tie_word_embeddings=False,
    )
    data = max(1, expert // tensor)
    parallel_ranks = all_parallel_ranks(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
    trainer_layouts = [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks]
    rollout_layouts = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    check_all(
        shape,
        trainer_layouts,
        rollout_layouts,
        locate(len(trainer_layouts), len(rollout_layouts)),
        bucket_bytes=1000,
    )


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "rollout"), itertools.product([1, 2, 4], [1, 2], [1, 2, 4])
)
def test_grid_dense_with_key_value_heads_repeated_and_several_engines(
    tensor, pipeline, rollout, engines
):
    shape = make_shape(num_layers=2, num_kv_heads=2, qkv_bias=True)
    trainer_layouts = [
        megatron_layout(shape, parallel_rank)
        for parallel_rank in all_parallel_ranks(tensor=tensor, pipeline=pipeline, data=2)
    ]
    engine = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    rollout_layouts = engine * engines
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
    trainer_layouts = [
        megatron_layout(shape, parallel_rank)
        for parallel_rank in all_parallel_ranks(tensor=2, pipeline=2)
    ]
    rollout_layouts = [rollout_layout(shape, rank, 4) for rank in range(4)] + [
        rollout_layout(shape, 0, 1)
    ]
    check_all(shape, trainer_layouts, rollout_layouts, apart(4, 5), bucket_bytes=500)


def test_a_colocated_replica_copies_all_that_its_device_holds():
    shape = make_shape(num_layers=2)
    trainer_layouts = [
        megatron_layout(shape, parallel_rank) for parallel_rank in all_parallel_ranks(data=4)
    ]
    rollout_layouts = [rollout_layout(shape, rank, 2) for rank in range(2)] * 2
    _, traffic = check_all(shape, trainer_layouts, rollout_layouts, colocated(4, 4))
    assert traffic.total_bytes(LinkType.network) == traffic.total_bytes(LinkType.same_node) == 0
    assert traffic.trainer_sent_bytes() == 0


def test_replicas_share_the_sending():
    shape = make_shape(
        num_layers=4, hidden_size=256, ffn_hidden_size=1536, num_heads=8, head_dim=32
    )
    trainer_layouts = [
        megatron_layout(shape, parallel_rank) for parallel_rank in all_parallel_ranks(data=4)
    ]
    rollout_layouts = [rollout_layout(shape, 0, 1)]
    _, traffic = check_all(shape, trainer_layouts, rollout_layouts, apart(4, 1, per_node=1))
    sent = traffic.sent_bytes[LinkType.network][:4]
    assert max(sent) < 1.3 * sum(sent) / 4


@settings(deadline=None, max_examples=25)
@given(
    models_and_ranks(),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3000),
)
def test_random_shapes(model, rollout, engines, per_node, together, bucket_bytes):
    shape, parallel_ranks = model
    shape = _divisible(shape, rollout)
    trainer_layouts = [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks]
    rollout_layouts = [rollout_layout(shape, rank, rollout) for rank in range(rollout)] * engines
    locations = (colocated if together else apart)(
        len(trainer_layouts), len(rollout_layouts), per_node
    )
    check_all(shape, trainer_layouts, rollout_layouts, locations, bucket_bytes=bucket_bytes)


def _divisible(shape, rollout):
    """The shape with widths that `rollout` tensor ranks can share."""
    changes = {
        "ffn_hidden_size": shape.ffn_hidden_size * rollout,
        "num_heads": shape.num_heads * rollout,
        "num_kv_heads": shape.num_kv_heads * rollout,
    }
    if shape.moe:
        changes["moe"] = dataclasses.replace(
            shape.moe, ffn_hidden_size=shape.moe.ffn_hidden_size * rollout
        )
    return dataclasses.replace(shape, **changes)


def part(name, start, stop, *, at=0, rows=None):
    """A shard of one column: rows [start, stop) of `name` at row `at`."""
    block = Block(name, Rect((start,), (stop,)), Rect((at,), (at + stop - start,)))
    return ShardLayout(f"p.{name}", (rows or at + stop - start,), (block,))


NODES = [RankLocation(0), RankLocation(1)]


@pytest.mark.parametrize(
    ("source", "target_layout", "message"),
    [
        ([part("w", 0, 4)], [part("w", 0, 8)], r"w Rect\(start=\(4,\), .*ranks \[1\].*no trainer"),
        (
            [part("v", 0, 8)],
            [part("w", 0, 8)],
            r"trainer ranks hold all tensors of the model except \[w\].*\[v\]",
        ),
        (
            [part("w", 0, 8)],
            [part("v", 0, 8)],
            r"rollout ranks need all tensors of the model except \[w\].*\[v\]",
        ),
    ],
)
def test_what_nobody_holds_or_knows_is_named(source, target_layout, message):
    with pytest.raises(ValueError, match=message):
        plan_transfer([source], [target_layout], NODES, "float32", names=["w"])


def test_an_element_that_two_blocks_write_is_named():
    twice = (part("w", 0, 4).blocks[0], part("w", 4, 8, at=3).blocks[0])
    target_layout = [ShardLayout("p", (8,), twice)]
    with pytest.raises(ValueError, match=r"a rollout rank: p holds .* overlap"):
        plan_transfer([[part("w", 0, 8)]], [target_layout], NODES, "float32", names=["w"])


def test_types_and_numbers_are_checked():
    shards = [part("w", 0, 8)]
    with pytest.raises(ValueError, match="w: dtype=int8"):
        plan_transfer([shards], [shards], NODES, "int8", names=["w"])
    with pytest.raises(ValueError, match="3 locations"):
        plan_transfer([shards], [shards], [*NODES, RankLocation(2)], "float32", names=["w"])


TRAINER_LAYOUTS = [layout(rows(0, 4)), layout(rows(4, 8))]
ROLLOUT_LAYOUTS = [layout(rows(0, 8)), layout(rows(0, 2))]
PLAN = plan_transfer(
    TRAINER_LAYOUTS, ROLLOUT_LAYOUTS, [RankLocation(n) for n in range(4)], "float32", names=["w"]
)  # buckets: rows 0-1 to both rollout ranks, rows 2-3 and rows 4-7 to the first


def spoiled(number, **changes):
    buckets = list(PLAN.buckets)
    buckets[number] = replace(buckets[number], **changes)
    return replace(PLAN, buckets=tuple(buckets))


def bucket_of(rect):
    return next(b for b in PLAN.buckets if b.slices[0].rect == rect)


FIRST, SECOND, THIRD = (bucket_of(rect) for rect in (rows(0, 2), rows(2, 4), rows(4, 8)))


def moved(bucket, rect):
    return (bucket.slices[0]._replace(rect=rect),)


def test_a_good_plan_passes():
    assert len(PLAN.buckets) == 3
    check_transfer_plan(PLAN, TRAINER_LAYOUTS, ROLLOUT_LAYOUTS)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            replace(PLAN, buckets=tuple(b for b in PLAN.buckets if b is not SECOND)),
            r"rollout rank 2: 8 of 32 elements of w .* do not arrive",
        ),
        (
            replace(PLAN, buckets=(*PLAN.buckets, replace(FIRST, hops=(Hop(0, 3),)))),
            r"rollout rank 3: w holds .* overlap",
        ),
        (spoiled(SECOND.index, slices=moved(SECOND, rows(1, 3))), r"rollout rank 2: w .* overlap"),
        (spoiled(THIRD.index, slices=moved(THIRD, rows(3, 8))), r"w Rect.* lies in no block"),
        (spoiled(THIRD.index, hops=(Hop(0, 2),)), r"w Rect.* lies in no block"),
        (
            spoiled(SECOND.index, hops=(Hop(0, 2), Hop(2, 3))),
            r"rank 3: w .* arrives but the rank does not hold it",
        ),
        (spoiled(SECOND.index, hops=(Hop(0, 2), Hop(2, 2))), "to rank 2 twice"),
        (spoiled(SECOND.index, hops=(Hop(3, 2),)), r"rank 3 forwards bucket .*w Rect.* before"),
        (spoiled(SECOND.index, hops=(Hop(0, 1),)), "to rank 1 which is not a rollout rank"),
    ],
)
def test_a_spoiled_plan_is_named(plan, message):
    with pytest.raises(ValueError, match=message):
        check_transfer_plan(plan, TRAINER_LAYOUTS, ROLLOUT_LAYOUTS)


def test_ranks_that_share_a_layout_are_told_apart_by_what_they_get():
    shared = layout(rows(0, 8))
    locations = [RankLocation(n) for n in range(4)]
    plan = plan_transfer(TRAINER_LAYOUTS, [shared, shared], locations, "float32", names=["w"])
    last = plan.buckets[-1]
    cut = replace(last, hops=last.hops[:1])
    with pytest.raises(ValueError, match="rollout rank 3: 16 of 32"):
        check_transfer_plan(
            replace(plan, buckets=(*plan.buckets[:-1], cut)), TRAINER_LAYOUTS, [shared, shared]
        )
    assert Rect.whole((8, 4)) == rows(0, 8)

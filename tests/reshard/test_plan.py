"""Whole plans, executed in memory: every shard right, own bytes only, the network's lower bound.

The grid is source (tensor, pipeline, expert) to rollout tensor size, for dense models and
models with experts, apart, colocated, and several engines; then random small shapes.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.links import Link, Location
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.traffic import count_traffic
from tests.reshard.delivery_in_memory import (
    execute,
    filled,
    make_tensors,
    network_bound,
    own_bytes,
)
from tests.reshard.model_cuts import all_places, make_moe_shape, make_shape, models_and_places
from tests.reshard.rollout_cuts import rollout_layout

FLOAT_BYTES = 4
GRID = list(itertools.product([1, 2, 4], [1, 2], [1, 2], [1, 2, 4]))


def apart(num_sources, num_sinks, per_node=2):
    """Trainer ranks on machines of their own."""
    first = -(-num_sources // per_node)
    return [Location(rank // per_node, rank % per_node) for rank in range(num_sources)] + [
        Location(first + rank // per_node, rank % per_node) for rank in range(num_sinks)
    ]


def colocated(num_sources, num_sinks, per_node=2):
    """Rollout rank n on the device of trainer rank n."""
    return [Location(rank // per_node, rank % per_node) for rank in range(num_sources)] + [
        Location(rank // per_node, rank % per_node) for rank in range(num_sinks)
    ]


def check_all(shape, sources, sinks, locations, **options):
    """The plan, after all that must hold for any plan."""
    shapes = hf_shapes(shape)
    plan = plan_delivery(sources, sinks, locations, "float32", names=list(shapes), **options)
    tensors = make_tensors(shapes)
    for layout, got in zip(sinks, execute(plan, sources, sinks, tensors), strict=True):
        for name, expected in filled(layout, tensors).items():
            assert np.array_equal(got[name], expected), name
    traffic = count_traffic(plan, locations)
    for rank, layout in zip(plan.sinks, sinks, strict=True):
        assert traffic.received_by(rank) == own_bytes(layout, FLOAT_BYTES)
    bound = network_bound(sources, sinks, locations, shapes, FLOAT_BYTES)
    assert traffic.total(Link.network) == plan.least_network_bytes == bound
    return plan, traffic


@pytest.mark.parametrize("place", [apart, colocated])
@pytest.mark.parametrize(("tensor", "pipeline", "expert", "rollout"), GRID)
def test_grid_with_experts(tensor, pipeline, expert, rollout, place):
    shape = make_moe_shape(num_layers=2, sparse=[True, False], num_experts=4, ffn=8, tied=False)
    data = max(1, expert // tensor)
    places = all_places(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
    sources = [megatron_layout(shape, place) for place in places]
    sinks = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    check_all(shape, sources, sinks, place(len(sources), len(sinks)), bucket_bytes=1000)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "rollout"), itertools.product([1, 2, 4], [1, 2], [1, 2, 4])
)
def test_grid_dense_with_key_value_heads_repeated_and_several_engines(
    tensor, pipeline, rollout, engines
):
    shape = make_shape(num_layers=2, num_kv_heads=2, qkv_bias=True)
    sources = [
        megatron_layout(shape, place)
        for place in all_places(tensor=tensor, pipeline=pipeline, data=2)
    ]
    engine = [rollout_layout(shape, rank, rollout) for rank in range(rollout)]
    sinks = engine * engines
    locations = apart(len(sources), len(sinks))
    plan, traffic = check_all(shape, sources, sinks, locations)
    # The trainer sends every byte once, whatever the number of engines and repeated heads.
    total = FLOAT_BYTES * sum(int(np.prod(s)) for s in hf_shapes(shape).values())
    assert traffic.sent_by_trainer() == total
    again = plan_delivery(sources, sinks, locations, "float32", names=list(hf_shapes(shape)))
    assert plan == again


def test_engines_of_different_sizes_are_served_by_one_plan():
    shape = make_moe_shape(num_layers=2, ffn=8)
    sources = [megatron_layout(shape, place) for place in all_places(tensor=2, pipeline=2)]
    sinks = [rollout_layout(shape, rank, 4) for rank in range(4)] + [rollout_layout(shape, 0, 1)]
    check_all(shape, sources, sinks, apart(4, 5), bucket_bytes=500)


def test_a_colocated_replica_copies_all_that_its_device_holds():
    shape = make_shape(num_layers=2)
    sources = [megatron_layout(shape, place) for place in all_places(data=4)]
    sinks = [rollout_layout(shape, rank, 2) for rank in range(2)] * 2
    _, traffic = check_all(shape, sources, sinks, colocated(4, 4))
    assert traffic.total(Link.network) == traffic.total(Link.same_node) == 0
    assert traffic.sent_by_trainer() == 0


def test_replicas_share_the_sending():
    shape = make_shape(num_layers=4, hidden=256, ffn=1536, num_heads=8, head_dim=32)
    sources = [megatron_layout(shape, place) for place in all_places(data=4)]
    sinks = [rollout_layout(shape, 0, 1)]
    _, traffic = check_all(shape, sources, sinks, apart(4, 1, per_node=1))
    sent = traffic.sent[Link.network][:4]
    assert max(sent) < 1.3 * sum(sent) / 4


@settings(deadline=None, max_examples=25)
@given(
    models_and_places(),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 3000),
)
def test_random_shapes(model, rollout, engines, per_node, together, bucket_bytes):
    shape, places = model
    shape = _divisible(shape, rollout)
    sources = [megatron_layout(shape, place) for place in places]
    sinks = [rollout_layout(shape, rank, rollout) for rank in range(rollout)] * engines
    locations = (colocated if together else apart)(len(sources), len(sinks), per_node)
    check_all(shape, sources, sinks, locations, bucket_bytes=bucket_bytes)


def _divisible(shape, rollout):
    """The shape with widths that `rollout` tensor ranks can share."""
    changes = {
        "ffn": shape.ffn * rollout,
        "num_heads": shape.num_heads * rollout,
        "num_kv_heads": shape.num_kv_heads * rollout,
    }
    if shape.moe:
        changes["moe"] = dataclasses.replace(shape.moe, ffn=shape.moe.ffn * rollout)
    return dataclasses.replace(shape, **changes)


def part(name, start, stop, *, at=0, rows=None):
    """A shard of one column: rows [start, stop) of `name` at row `at`."""
    block = Block(name, Rect((start,), (stop,)), Rect((at,), (at + stop - start,)))
    return ShardLayout(f"p.{name}", (rows or at + stop - start,), (block,))


NODES = [Location(0), Location(1)]


@pytest.mark.parametrize(
    ("source", "sink", "message"),
    [
        ([part("w", 0, 4)], [part("w", 0, 8)], r"w Rect\(start=\(4,\), .*ranks \[1\].*no trainer"),
        ([part("v", 0, 8)], [part("w", 0, 8)], r"trainer ranks hold all but \[w\].*\[v\]"),
        ([part("w", 0, 8)], [part("v", 0, 8)], r"rollout ranks want all but \[w\].*\[v\]"),
    ],
)
def test_what_nobody_holds_or_knows_is_named(source, sink, message):
    with pytest.raises(ValueError, match=message):
        plan_delivery([source], [sink], NODES, "float32", names=["w"])


def test_an_element_that_two_blocks_write_is_named():
    twice = (part("w", 0, 4).blocks[0], part("w", 4, 8, at=3).blocks[0])
    sink = [ShardLayout("p", (8,), twice)]
    with pytest.raises(ValueError, match=r"a rollout rank: p holds .* overlap"):
        plan_delivery([[part("w", 0, 8)]], [sink], NODES, "float32", names=["w"])


def test_types_and_numbers_are_checked():
    shards = [part("w", 0, 8)]
    with pytest.raises(ValueError, match="w: dtype=int8"):
        plan_delivery([shards], [shards], NODES, "int8", names=["w"])
    with pytest.raises(ValueError, match="3 locations"):
        plan_delivery([shards], [shards], [*NODES, Location(2)], "float32", names=["w"])

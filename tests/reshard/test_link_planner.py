"""Links of the same ranks: what is shared, what is kept, and what changes with the locations."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mega_agentrl.reshard.layout import PackedLayout
from mega_agentrl.reshard.link_planner import LinkPlanner
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.topology import RankLocation
from mega_agentrl.reshard.verify.digest_verifier import regions_of_layout
from tests.reshard.model_cuts import make_moe_shape, trainer_layouts_of
from tests.reshard.rollout_cuts import engine_layouts

SHAPE = make_moe_shape(num_layers=2, ffn_hidden_size=8)
LOCATIONS = [RankLocation(0)] * 4 + [RankLocation(1)] * 2 + [RankLocation(2)] * 2


@pytest.fixture
def planner():
    return LinkPlanner(list(hf_shapes(SHAPE)), "float32", bucket_bytes=1000)


def packed(layouts):
    """Layouts as separate processes send them."""
    return [PackedLayout.pack(pickle.loads(pickle.dumps(layout))) for layout in layouts]


@pytest.fixture
def sides(planner):
    """Two replicas of two tensor ranks, and two engines of two ranks."""
    trainer = [planner.unpack(p) for p in packed(trainer_layouts_of(SHAPE, tensor=2, data=2))]
    engines = [[planner.unpack(p) for p in packed(engine_layouts(SHAPE, 2))] for _ in range(2)]
    return trainer, engines


def test_equal_shards_of_several_processes_become_one_object(sides):
    trainer, engines = sides
    assert engines[0] == engine_layouts(SHAPE, 2)
    assert engines[0][0] is engines[1][0] is not engines[0][1]
    assert trainer[0] is trainer[2] is not trainer[1]


def test_ranks_get_their_parts_and_equal_parts_are_one_object(planner, sides):
    link = planner.plan(*sides, LOCATIONS)
    assert link.engine_plans[0] is link.engine_plans[1]
    assert link.engine_plans[0].buckets == link.plan.buckets
    for rank, part in enumerate(link.trainer_plans):
        assert list(part.hops_of(rank)) == list(link.plan.hops_of(rank))
    for layout, rows in zip([*sides[1][0], *sides[1][1]], link.region_indices, strict=True):
        assert np.array_equal(rows, link.verifier.region_indices(regions_of_layout(layout)))
    assert pickle.loads(pickle.dumps(link.plan)) == link.plan


def test_a_link_of_the_same_ranks_and_locations_is_not_planned_again(planner, sides):
    link = planner.plan(*sides, LOCATIONS)
    assert planner.plan(*sides, list(LOCATIONS)) is link
    one_node = planner.plan(*sides, [RankLocation(0)] * 8)
    assert one_node.verifier is link.verifier
    assert one_node.plan.min_network_bytes == 0 < link.plan.min_network_bytes


def test_old_links_are_forgotten(planner, sides):
    trainer, engines = sides
    first = planner.plan(trainer, engines, LOCATIONS)
    for node in range(1, 6):
        planner.plan(trainer, engines[:1], [*LOCATIONS[:4], *[RankLocation(node)] * 2])
    again = planner.plan(trainer, engines, LOCATIONS)
    assert again is not first
    assert again.plan == first.plan

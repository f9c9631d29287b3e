"""A repeated sample says what all layouts together say."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.names import megatron_layout
from mega_agentrl.reshard.place import Place
from mega_agentrl.reshard.regions import RankSets, owned
from mega_agentrl.reshard.repetition import (
    TrainerCut,
    kinds,
    repeated_sinks,
    repeated_sources,
    sample_shape,
)
from tests.reshard.model_cuts import make_moe_shape, make_shape
from tests.reshard.rollout_cuts import rollout_layout

MIXED = make_moe_shape(num_layers=4, sparse=[False, True, True, False], ffn=8, tied=False)


def test_the_first_layer_of_each_kind_is_the_sample():
    assert kinds(MIXED) == [0, 1]
    assert kinds(make_moe_shape()) == kinds(make_shape()) == [0]
    sparse_first = make_moe_shape(num_layers=2, sparse=[True, False])
    assert kinds(sparse_first) == [1, 0]
    assert sample_shape(sparse_first).moe.sparse == (False, True)


@pytest.mark.parametrize("shape", [MIXED, make_shape(), make_moe_shape()])
def test_sources_are_those_of_all_ranks(shape):
    cut = TrainerCut(tensor=2, pipeline=2, data=2, expert=4 if shape.moe else 1)
    places = [
        Place(
            tensor_rank=rank % 2,
            tensor_size=2,
            pipeline_rank=stage,
            pipeline_size=2,
            expert_rank=rank % cut.expert,
            expert_size=cut.expert,
        )
        for stage in range(2)
        for rank in range(4)
    ]
    expected = owned([megatron_layout(shape, place) for place in places], RankSets())
    assert len(places) == cut.num_ranks
    assert repeated_sources(shape, cut, RankSets()) == expected


@pytest.mark.parametrize("shape", [MIXED, make_shape(), make_moe_shape()])
def test_sinks_are_those_of_all_engines(shape):
    engine = [rollout_layout(shape, rank, 2) for rank in range(2)]
    sample = [rollout_layout(sample_shape(shape), rank, 2) for rank in range(2)]
    expected = owned(engine * 3, RankSets(), first_rank=5)
    assert repeated_sinks(shape, sample, 3, RankSets(), first_rank=5) == expected


def test_layers_that_the_stages_do_not_divide_are_dealt_evenly():
    shape = make_shape(num_layers=5, tied=False)
    held = repeated_sources(shape, TrainerCut(pipeline=3), RankSets())
    ranks = [
        next(iter(held[f"model.layers.{layer}.input_layernorm.weight"].values()))
        for layer in range(5)
    ]
    assert ranks == [(0,), (0,), (1,), (1,), (2,)]


def test_experts_must_share_the_ranks_of_a_stage():
    with pytest.raises(ValueError, match="expert=3"):
        TrainerCut(tensor=2, data=2, expert=3)

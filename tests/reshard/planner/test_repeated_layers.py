"""A repeated sample says what all layouts together say."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.mapping.model_mapping import megatron_layout
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.planner.regions import RankSetCache, rect_owners
from mega_agentrl.reshard.planner.repeated_layers import (
    TrainerParallelSizes,
    expand_rollout_owners,
    expand_trainer_owners,
    first_layer_of_each_type,
    one_layer_per_type,
)
from tests.reshard.model_cuts import make_moe_shape, make_shape
from tests.reshard.rollout_cuts import rollout_layout

MIXED = make_moe_shape(
    num_layers=4,
    moe_layer_pattern=[False, True, True, False],
    ffn_hidden_size=8,
    tie_word_embeddings=False,
)


def test_the_first_layer_of_each_kind_is_the_sample():
    assert first_layer_of_each_type(MIXED) == [0, 1]
    assert (
        first_layer_of_each_type(make_moe_shape()) == first_layer_of_each_type(make_shape()) == [0]
    )
    sparse_first = make_moe_shape(num_layers=2, moe_layer_pattern=[True, False])
    assert first_layer_of_each_type(sparse_first) == [1, 0]
    assert one_layer_per_type(sparse_first).moe.moe_layer_pattern == (False, True)


@pytest.mark.parametrize("shape", [MIXED, make_shape(), make_moe_shape()])
def test_sources_are_those_of_all_ranks(shape):
    cut = TrainerParallelSizes(
        tensor_size=2, pipeline_size=2, data_size=2, expert_size=4 if shape.moe else 1
    )
    parallel_ranks = [
        ModelParallelRank(
            tensor_rank=rank % 2,
            tensor_size=2,
            pipeline_rank=stage,
            pipeline_size=2,
            expert_rank=rank % cut.expert_size,
            expert_size=cut.expert_size,
        )
        for stage in range(2)
        for rank in range(4)
    ]
    expected = rect_owners(
        [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks], RankSetCache()
    )
    assert len(parallel_ranks) == cut.num_ranks
    assert expand_trainer_owners(shape, cut, RankSetCache()) == expected


@pytest.mark.parametrize("shape", [MIXED, make_shape(), make_moe_shape()])
def test_rollout_ranks_are_those_of_all_engines(shape):
    engine = [rollout_layout(shape, rank, 2) for rank in range(2)]
    sample = [rollout_layout(one_layer_per_type(shape), rank, 2) for rank in range(2)]
    expected = rect_owners(engine * 3, RankSetCache(), first_rank=5)
    assert expand_rollout_owners(shape, sample, 3, RankSetCache(), first_rank=5) == expected


def test_layers_that_the_stages_do_not_divide_are_dealt_evenly():
    shape = make_shape(num_layers=5, tie_word_embeddings=False)
    held = expand_trainer_owners(shape, TrainerParallelSizes(pipeline_size=3), RankSetCache())
    ranks = [
        next(iter(held[f"model.layers.{layer}.input_layernorm.weight"].values()))
        for layer in range(5)
    ]
    assert ranks == [(0,), (0,), (1,), (1,), (2,)]


def test_experts_must_share_the_ranks_of_a_stage():
    with pytest.raises(ValueError, match="expert=3"):
        TrainerParallelSizes(tensor_size=2, data_size=2, expert_size=3)

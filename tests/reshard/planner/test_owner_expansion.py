"""Owners expanded from a sample of layers equal those of all layouts."""

from __future__ import annotations

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_mapping import megatron_layout
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.planner.owner_expansion import (
    TrainerParallelSizes,
    expand_rollout_owners,
    expand_trainer_owners,
    one_layer_per_type,
)
from mega_agentrl.reshard.planner.regions import RankSetCache, rect_owners
from tests.reshard.model_cuts import make_moe_shape, make_shape
from tests.reshard.rollout_cuts import engine_layouts

SHAPES = {
    "mixed": make_moe_shape(
        moe_layer_pattern=[False, True, True, False], ffn_hidden_size=8, tie_word_embeddings=False
    ),
    "dense": make_shape(),
    "experts": make_moe_shape(),
    "experts-first": make_moe_shape(num_layers=2, moe_layer_pattern=[True, False]),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_trainer_owners_are_those_of_all_ranks(shape):
    sizes = TrainerParallelSizes(
        tensor_size=2, pipeline_size=2, data_size=2, expert_size=4 if shape.moe else 1
    )
    parallel_ranks = [
        ModelParallelRank(
            tensor_rank=rank % 2,
            tensor_size=2,
            pipeline_rank=stage,
            pipeline_size=2,
            expert_rank=rank % sizes.expert_size,
            expert_size=sizes.expert_size,
        )
        for stage in range(2)
        for rank in range(4)
    ]
    expected = rect_owners(
        [megatron_layout(shape, parallel_rank) for parallel_rank in parallel_ranks], RankSetCache()
    )
    assert len(parallel_ranks) == sizes.num_ranks
    assert expand_trainer_owners(shape, sizes, RankSetCache()) == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rollout_owners_are_those_of_all_engines(shape):
    sample = engine_layouts(one_layer_per_type(shape), 2)
    expected = rect_owners(engine_layouts(shape, 2) * 3, RankSetCache(), first_rank=5)
    assert expand_rollout_owners(shape, sample, 3, RankSetCache(), first_rank=5) == expected


def test_layers_that_the_stages_do_not_divide_are_assigned_evenly():
    shape = make_shape(num_layers=5, tie_word_embeddings=False)
    held = expand_trainer_owners(shape, TrainerParallelSizes(pipeline_size=3), RankSetCache())
    ranks = [
        next(iter(held[f"model.layers.{layer}.input_layernorm.weight"].values()))
        for layer in range(5)
    ]
    assert ranks == [(0,), (0,), (1,), (1,), (2,)]


def test_experts_must_share_the_ranks_of_a_stage():
    with pytest.raises(InputError) as caught:
        TrainerParallelSizes(tensor_size=2, data_size=2, expert_size=3)
    assert (caught.value.name, caught.value.got) == ("expert", 3)

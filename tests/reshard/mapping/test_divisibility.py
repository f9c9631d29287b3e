"""Sizes that do not divide the model are named with their key, and those that do pass."""

from dataclasses import replace

import pytest

from mega_agentrl.reshard.mapping.divisibility import check_divisible
from mega_agentrl.reshard.mapping.model_parallel_rank import ModelParallelRank
from tests.reshard.model_cuts import make_moe_shape, make_shape

DENSE, MOE = make_shape(), make_moe_shape()


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (DENSE, {"tensor_size": 3}, r"parallel.tensor=3: the model's num_attention_heads is 8"),
        (
            make_shape(num_heads=12, num_kv_heads=6, ffn_hidden_size=24),
            {"tensor_size": 4},
            r"parallel.tensor=4: the model's num_key_value_heads is 6; expected a divisor or a",
        ),
        (
            make_shape(num_heads=8, num_kv_heads=2, head_dim=1, ffn_hidden_size=8),
            {"tensor_size": 8},
            r"parallel.tensor=8: the model's rows of q, k and v is 12",
        ),
        (
            make_shape(ffn_hidden_size=25),
            {"tensor_size": 2},
            r"tensor=2: the model's intermediate_size is 25",
        ),
        (DENSE, {"pipeline_size": 3}, r"virtual_pipeline=3: the model's num_hidden_layers is 4"),
        (
            DENSE,
            {"pipeline_size": 2, "virtual_size": 4},
            r"parallel.pipeline \* parallel.virtual_pipeline=8: the model's num_hidden_layers is 4",
        ),
        (
            DENSE,
            {"virtual_size": 2},
            r"parallel.virtual_pipeline=2: expected 1 with parallel.pipeline=1",
        ),
        (DENSE, {"expert_size": 2}, r"parallel.expert=2: expected 1, the model has no experts"),
        (MOE, {"expert_size": 3}, r"parallel.expert=3: the model's num_experts is 4"),
        (
            MOE,
            {"expert_tensor_size": 4},
            r"parallel.expert_tensor=4: the model's moe_intermediate_size is 6",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(shape, sizes, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_divisible(shape, ModelParallelRank(**sizes))
    assert "expected" in str(caught.value)
    assert "probable cause" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (DENSE, {"tensor_size": 8}),  # each of 4 key/value heads on two ranks
        (DENSE, {"pipeline_size": 2, "virtual_size": 2}),
        (DENSE, {"expert_tensor_size": 7}),  # of no meaning without experts
        (MOE, {"expert_size": 4, "expert_tensor_size": 3}),
        (MOE, {"tensor_size": 4}),
    ],
)
def test_what_divides_passes(shape, sizes):
    check_divisible(shape, ModelParallelRank(**sizes))


def test_the_dense_width_counts_only_where_a_layer_is_dense():
    odd = replace(MOE, ffn_hidden_size=25)
    check_divisible(odd, ModelParallelRank(tensor_size=2))
    mixed = replace(make_moe_shape(moe_layer_pattern=[True, False, True, True]), ffn_hidden_size=25)
    with pytest.raises(ValueError, match="intermediate_size is 25"):
        check_divisible(mixed, ModelParallelRank(tensor_size=2))

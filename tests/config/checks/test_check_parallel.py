"""Sizes of policy and engines that can share GPUs."""

from functools import reduce

import pytest

from mega_agentrl.config.checks.parallel import (
    check_colocation,
    check_lora,
    check_tree_attention,
    check_zero_mismatch,
    min_ranks_per_node,
    split_layers,
)
from mega_agentrl.config.enums import Dtype, TreeAttention
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import LoraConfig, ModelConfig, ParallelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig
from tests.config.refusals import refused_setting


def configured(num_engines, engine_tensor, colocated=True, **layout):
    return TrainConfig(
        parallel=ParallelConfig(**layout),
        engine=EngineConfig(tensor_parallel_size=engine_tensor),
        cluster=ClusterConfig(num_engines=num_engines, colocated=colocated),
    )


@pytest.mark.parametrize(
    ("num_engines", "tensor", "layout"),
    [
        (4, 2, {"tensor": 4, "data": 2}),
        (2, 4, {"tensor": 2, "data": 4}),
        (1, 2, {"data": 4}),  # two GPUs without an engine
        (3, 2, {"tensor": 3, "pipeline": 2}),
    ],
)
def test_engines_use_all_ranks_or_some(num_engines, tensor, layout):
    check_colocation(configured(num_engines, tensor, **layout))


@pytest.mark.parametrize(("num_engines", "tensor"), [(3, 1), (1, 3), (4, 2), (2, 4)])
def test_engines_that_do_not_divide_the_ranks_are_refused(num_engines, tensor):
    made = configured(num_engines, tensor, data=4)
    assert refused_setting(check_colocation, made) == ("cluster.num_engines", num_engines)
    made.cluster.colocated = False
    check_colocation(made)


def test_asynchronous_rollouts_are_refused():
    made = configured(1, 1)
    made.rollout.max_staleness = 1
    assert refused_setting(check_colocation, made) == ("rollout.max_staleness", 1)


def test_there_must_be_a_model_to_share_the_policys_gpus_with():
    made = configured(1, 1, colocated=False)
    made.cluster.colocated_models = True
    assert refused_setting(check_colocation, made) == ("cluster.colocated_models", True)
    made.algo.advantage = "gae"
    check_colocation(made)


def test_tensor_groups_and_engines_do_not_span_machines():
    assert min_ranks_per_node(configured(1, 8, tensor=2, data=4)) == 8
    assert min_ranks_per_node(configured(4, 2, tensor=8)) == 8
    assert min_ranks_per_node(configured(3, 2, tensor=3, data=2)) == 6
    assert min_ranks_per_node(configured(1, 8, colocated=False, tensor=2, data=4)) == 2


@pytest.mark.parametrize(
    ("model", "dtype", "is_refused"),
    [
        ({"head_dim": 128}, Dtype.auto, False),
        ({"head_dim": 80}, Dtype.auto, True),
        ({"head_dim": 128}, Dtype.float32, True),
        ({"hidden_size": 3584, "num_attention_heads": 28}, Dtype.bfloat16, False),
        ({"hidden_size": 2560, "num_attention_heads": 32}, Dtype.bfloat16, True),
    ],
    ids=["128", "80", "float32", "from the width", "80 from the width"],
)
def test_triton_tree_attention_needs_heads_that_it_computes(model, dtype, is_refused):
    config = TrainConfig(model=ModelConfig(tree_attention=TreeAttention.triton, dtype=dtype))
    model = {"architectures": ["Qwen2ForCausalLM"], **model}
    if is_refused:
        got = refused_setting(check_tree_attention, config, model)
        assert got == ("model.tree_attention", "triton")
    else:
        check_tree_attention(config, model)
    config.model.tree_attention = TreeAttention.gather
    check_tree_attention(config, model)


@pytest.mark.parametrize(
    ("layout", "reference", "refused"),
    [
        ({"tensor": 4}, "", None),
        ({"tensor": 8}, "", "parallel.tensor"),
        ({"tensor": 2, "data": 2, "expert_tensor": 4}, "", "parallel.expert_tensor"),
        ({"tensor": 4}, "reference", "model.reference_path"),
    ],
)
def test_adapters_need_a_layout_and_a_reference_that_they_can_share(layout, reference, refused):
    config = TrainConfig(parallel=ParallelConfig(**layout))
    config.model = ModelConfig(lora=LoraConfig(rank=8), reference_path=reference)
    model = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4}
    if refused is None:
        check_lora(config, model)
    else:
        assert refused_setting(check_lora, config, model)[0] == refused
    config.model.lora.rank = 0
    check_lora(config, model)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, {}),
        ({"vision_config": {}}, {}),
        ({}, {"model.dtype": Dtype.bfloat16}),
        ({}, {"rollout.max_staleness": 1}),
    ],
    ids=["experts", "images", "bfloat16", "staleness"],
)
def test_a_mismatch_of_zero_needs_dense_text_models_and_current_weights(model, changes):
    config, model = TrainConfig(), {"architectures": ["Qwen3ForCausalLM"], **model}
    for key, value in changes.items():
        *path, name = key.split(".")
        setattr(reduce(getattr, path, config), name, value)
    check_zero_mismatch(config, model)
    config.model.zero_mismatch = True
    assert refused_setting(check_zero_mismatch, config, model)[0] == "model.zero_mismatch"
    check_zero_mismatch(
        TrainConfig(model=ModelConfig(zero_mismatch=True)), {"architectures": ["Qwen3ForCausalLM"]}
    )


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (6, 4, [1, 2, 2, 1]),
        (94, 8, [11, *[12] * 6, 11]),
        (94, 32, [2, *[3] * 30, 2]),
        (5, 2, []),
        (10, 12, []),  # two stages would have no layer
        (4, 6, []),
    ],
)
def test_the_ends_of_a_pipeline_have_a_layer_fewer_where_that_makes_the_rest_equal(
    num_layers, num_stages, sizes
):
    stages = split_layers(num_layers, num_stages)
    assert list(map(len, stages)) == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers if sizes else 0))

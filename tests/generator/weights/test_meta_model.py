"""Being one rank of an engine leaves no trace behind."""

from __future__ import annotations

import pytest
from vllm.distributed import parallel_state

from mega_agentrl.generator.weights.meta_model import (
    build_meta_copy,
    build_meta_model,
    fake_tensor_rank,
    make_vllm_config,
)
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    folder = make_tiny_model("qwen3", path, head_dim=32, num_attention_heads=32)
    return make_vllm_config(str(folder), tensor_size=32, dtype="bfloat16")


def test_a_rank_is_asked_for_by_model_code_and_forgotten_after(config):
    before = parallel_state._TP
    with fake_tensor_rank(config, 3):
        assert parallel_state.get_tensor_model_parallel_rank() == 3
        assert parallel_state.get_tensor_model_parallel_world_size() == 32
        assert parallel_state.get_pp_group().is_last_rank
    assert parallel_state._TP is before


def test_groups_come_back_after_an_error(config):
    before = parallel_state._EP
    with pytest.raises(KeyError), fake_tensor_rank(config, 0):
        raise KeyError
    assert parallel_state._EP is before


def test_the_same_config_builds_twice_without_memory(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    config = make_vllm_config(str(folder), tensor_size=2, dtype="float32")
    for rank in range(2):
        with fake_tensor_rank(config, rank):
            parameters = dict(build_meta_model(config).named_parameters())
        assert all(parameter.is_meta for parameter in parameters.values())
        assert parameters["model.layers.0.self_attn.qkv_proj.weight"].shape == (128, 32)


def test_a_model_beside_a_running_one_leaves_its_settings_alone(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    config = make_vllm_config(str(folder), tensor_size=2, dtype="float32")
    with fake_tensor_rank(config, 1):
        running = build_meta_model(config)
        layers = dict(config.compilation_config.static_forward_context)
        beside = build_meta_copy(config)
    assert config.compilation_config.static_forward_context == layers
    assert all(parameter.is_meta for parameter in beside.parameters())
    shapes = {name: parameter.shape for name, parameter in running.named_parameters()}
    assert {name: p.shape for name, p in beside.named_parameters()} == shapes
    assert layers

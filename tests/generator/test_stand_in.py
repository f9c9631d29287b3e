"""Being one rank of an engine leaves no trace behind."""

from __future__ import annotations

import pytest
from vllm.distributed import parallel_state

from mega_agentrl.generator.stand_in import (
    build_beside,
    build_model,
    model_config,
    standing_in,
)
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    folder = make_tiny_model("qwen3", path, head_dim=32, num_attention_heads=32)
    return model_config(str(folder), tensor_size=32, dtype="bfloat16")


def test_a_rank_is_asked_for_by_model_code_and_forgotten_after(config):
    before = parallel_state._TP
    with standing_in(config, 3):
        assert parallel_state.get_tensor_model_parallel_rank() == 3
        assert parallel_state.get_tensor_model_parallel_world_size() == 32
        assert parallel_state.get_pp_group().is_last_rank
    assert parallel_state._TP is before


def test_groups_come_back_after_an_error(config):
    before = parallel_state._EP
    with pytest.raises(KeyError), standing_in(config, 0):
        raise KeyError
    assert parallel_state._EP is before


def test_the_same_config_builds_twice_without_memory(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    config = model_config(str(folder), tensor_size=2, dtype="float32")
    for rank in range(2):
        with standing_in(config, rank):
            parameters = dict(build_model(config).named_parameters())
        assert all(parameter.is_meta for parameter in parameters.values())
        assert parameters["model.layers.0.self_attn.qkv_proj.weight"].shape == (128, 32)


def test_a_model_beside_a_running_one_leaves_its_settings_alone(tmp_path):
    folder = make_tiny_model("qwen3", tmp_path, head_dim=32)
    config = model_config(str(folder), tensor_size=2, dtype="float32")
    with standing_in(config, 1):
        running = build_model(config)
        layers = dict(config.compilation_config.static_forward_context)
        beside = build_beside(config)
    assert config.compilation_config.static_forward_context == layers
    assert all(parameter.is_meta for parameter in beside.parameters())
    shapes = {name: parameter.shape for name, parameter in running.named_parameters()}
    assert {name: p.shape for name, p in beside.named_parameters()} == shapes
    assert layers

"""An engine rank's memory by hand, and against the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.estimate.device import GIB, DeviceSpec
from mega_agentrl.estimate.memory.engine import (
    estimate_engine_memory,
    num_engine_rank_parameters,
    num_open_elements,
)
from mega_agentrl.estimate.memory.engine_layout import engine_shard_layouts, num_elements
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.planner import plan_transfer
from mega_agentrl.reshard.planner.traffic import max_open_bytes
from mega_agentrl.reshard.topology import RankLocation
from tests.estimate.configs import configured
from tests.estimate.shapes import released
from tests.reshard.model_cuts import trainer_layouts_of
from tests.reshard.rollout_cuts import engine_layouts
from tests.vision_models import VISION_FAMILIES, make_vision_model


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-30b-a3b", "deepseek-v3-sized"])
def test_parameters_counted_by_one_layer_of_each_kind_are_those_of_all_layers(name, size):
    shape = released(name, num_hidden_layers=6)
    layouts = engine_shard_layouts(shape, 0, size)
    assert num_engine_rank_parameters(shape, size) == num_elements(layouts)


def test_the_cache_is_what_is_left_of_the_share():
    config = configured(engine=4)
    memory = estimate_engine_memory(config, released("qwen3-32b"), DeviceSpec(memory_gib=80))
    taken = memory.weights + memory.activations + memory.logits + memory.runtime
    taken += memory.cuda_graphs
    assert memory.kv_cache == pytest.approx(0.85 * 80 * GIB - taken, abs=1)
    # Layers, key heads of a rank, width, bf16.
    assert memory.kv_bytes_per_token == 2 * 64 * 2 * 128 * 2
    assert memory.num_kv_cache_tokens == memory.kv_cache // memory.kv_bytes_per_token
    assert (memory.peak, memory.entropy_tap) == (round(0.85 * 80 * GIB) + memory.transfer, 0)


def test_ranks_beyond_the_key_heads_hold_one_each():
    config = configured(engine=8)
    memory = estimate_engine_memory(config, released("qwen3-235b-a22b"), DeviceSpec())
    assert memory.kv_bytes_per_token == 2 * 94 * 1 * 128 * 2


def test_more_tensor_ranks_leave_more_for_the_cache():
    shape = released("qwen3-32b")
    one, two, four, eight = (
        estimate_engine_memory(configured(engine=size), shape, DeviceSpec()).num_kv_cache_tokens
        for size in (1, 2, 4, 8)
    )
    assert one < two <= four <= eight


def test_a_share_smaller_than_the_weights_has_no_cache():
    config = configured()
    config.engine.gpu_memory_utilization = 0.5
    memory = estimate_engine_memory(config, released("qwen3-32b"), DeviceSpec())
    assert memory.num_kv_cache_tokens == 0


def test_an_exact_engine_keeps_its_weights_in_float64_too():
    config, shape = configured(), released("qwen3-4b")
    plain = estimate_engine_memory(config, shape, DeviceSpec())
    config.model.zero_mismatch = True
    exact = estimate_engine_memory(config, shape, DeviceSpec())
    assert exact.weights - plain.weights == 8 * num_engine_rank_parameters(shape, 1)
    assert exact.kv_cache - plain.kv_cache == plain.weights - exact.weights
    assert exact.transfer == plain.transfer


def test_sorting_for_top_p_and_graphs_take_from_the_cache():
    config = configured()
    config.rollout.top_p = 0.9
    shape = released("qwen3-4b")
    config.engine.enforce_eager = False
    costly = estimate_engine_memory(config, shape, DeviceSpec())
    config.rollout.top_p = 1.0
    config.engine.enforce_eager = True
    plain = estimate_engine_memory(config, shape, DeviceSpec())
    sorting = 256 * shape.vocab_size * 12
    assert costly.logits - plain.logits == sorting
    # vLLM reserves the graphs within its share.
    assert plain.kv_cache - costly.kv_cache == sorting + GIB
    assert (costly.peak, costly.outside_vllm_bytes) == (plain.peak, plain.outside_vllm_bytes)
    assert costly.sleeping_bytes - plain.sleeping_bytes == GIB


@pytest.mark.parametrize(
    ("family", "num_features"), [("qwen2_5_vl", 1), ("qwen3_vl", 2)], ids=VISION_FAMILIES
)
def test_features_of_images_take_from_the_cache(family, num_features, tmp_path):
    config = configured()
    config.engine.max_model_len = 10_000
    shape = ModelShape.from_folder(make_vision_model(family, tmp_path))
    with_images = estimate_engine_memory(config, shape, DeviceSpec())
    text = estimate_engine_memory(config, replace(shape, vision=None), DeviceSpec())
    # Tokens of a step, width of a feature, one more for each DeepStack block, bf16.
    assert with_images.encoder_cache == 10_000 * shape.hidden_size * num_features * 2
    # Patches, their values, three hidden states and three inner products of the tower.
    tower = 40_000 * (3 * 2 * 14 * 14 + 3 * 16 + 3 * 24) * 2
    assert (with_images.activations, text.encoder_cache) == (tower, 0)
    taken = with_images.weights - text.weights + tower - text.activations
    assert text.kv_cache - with_images.kv_cache == taken + with_images.encoder_cache


def test_on_a_cpu_the_cache_has_its_own_size():
    config = configured()
    memory = estimate_engine_memory(config, released("qwen3-4b"), DeviceSpec(memory_gib=None))
    assert memory.kv_cache == config.engine.cpu_kv_cache_gib * GIB
    assert memory.kv_bytes_per_token == 2 * 36 * 8 * 128 * 4


def test_on_a_cpu_a_bucket_is_no_larger_than_the_weights():
    config, shape = configured(), released("qwen3-4b")
    usual = estimate_engine_memory(config, shape, DeviceSpec(memory_gib=None))
    config.weight_sync.bucket_mib = 2**20
    large = estimate_engine_memory(config, shape, DeviceSpec(memory_gib=None))
    # The whole model fits into a bucket, so all of its modules are open at once.
    opened = large.weights - 4 * num_open_elements(shape, 1)
    assert large.transfer - usual.transfer == 2 * (large.weights - 64 * 2**20) + opened
    assert large.runtime == (45 + 90) * 2**20


def test_on_shared_gpus_the_cache_lies_beside_what_the_policy_leaves():
    config, shape = configured(engine=4), released("qwen3-32b")
    alone = estimate_engine_memory(config, shape, DeviceSpec())
    config.cluster.colocated = True
    shared = estimate_engine_memory(config, shape, DeviceSpec())
    buckets = 2 * 64 * 2**20
    assert shared.peak - alone.peak == shared.colocated_policy == 3 * GIB + buckets
    assert shared.kv_cache == alone.kv_cache
    # Asleep it has CUDA's context, the graphs and the link's buckets.
    assert shared.sleeping_bytes == (2 + 1) * GIB + buckets
    assert shared.loading_bytes == shared.weights + shared.transfer + (2 + 1) * GIB
    assert estimate_engine_memory(config, shape, DeviceSpec(memory_gib=None)).colocated_policy == 0


SMALL_VOCABULARY = {"vocab_size": 1024}
"""With it the largest unit of an update is a layer, and otherwise the embedding of dense models."""


@pytest.mark.parametrize(
    ("name", "changes", "trainer", "size"),
    [
        ("qwen3-4b", {}, {"tensor": 2, "data": 4}, 1),
        ("qwen3-4b", SMALL_VOCABULARY, {"tensor": 2, "data": 4}, 1),
        ("qwen3-32b", SMALL_VOCABULARY, {"tensor": 8, "pipeline": 2}, 8),
        ("qwen3-30b-a3b", {}, {"tensor": 4, "data": 2, "expert": 8}, 4),
        pytest.param(
            *("deepseek-v3-sized", {}),
            {"tensor": 8, "pipeline": 2, "data": 2, "expert": 16},
            16,
            marks=pytest.mark.extended,
        ),
    ],
    ids=["embedding", "dense-layer", "dense-many-ranks", "experts", "experts-over-machines"],
)
def test_the_plan_opens_no_more_modules_than_the_estimate_has(name, changes, trainer, size):
    shape = released(name, num_hidden_layers=8, **changes)
    trainer_layouts, engine = trainer_layouts_of(shape, **trainer), engine_layouts(shape, size)
    num_trainer_ranks = len(trainer_layouts)
    plan = plan_transfer(
        trainer_layouts,
        engine * 2,
        [RankLocation(rank // 8, rank) for rank in range(num_trainer_ranks + 2 * size)],
        "bfloat16",
        names=list(hf_shapes(shape)),
    )
    walked = max(
        max_open_bytes(plan, rank, layout) for rank, layout in enumerate(engine, num_trainer_ranks)
    )
    estimate = 2 * num_open_elements(shape, size)
    # A layer that comes in several buckets closes some modules before it opens others.
    assert walked <= estimate <= 2 * walked

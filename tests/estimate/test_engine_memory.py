"""An engine rank's memory by hand, and against the layout."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.device import GIB, Device
from mega_agentrl.estimate.engine_layout import engine_layout, num_elements
from mega_agentrl.estimate.engine_memory import engine_memory, num_weights
from tests.estimate.configs import configured
from tests.estimate.shapes import released


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-30b-a3b", "deepseek-v3-sized"])
def test_one_layer_of_each_kind_stands_for_all(name, size):
    shape = released(name, num_hidden_layers=6)
    assert num_weights(shape, size) == num_elements(engine_layout(shape, 0, size))


def test_the_cache_is_what_is_left_of_the_share():
    config = configured(engine=4)
    memory = engine_memory(config, released("qwen3-32b"), Device(gib=80))
    taken = memory.weights + memory.activations + memory.logits + memory.runtime
    assert memory.cache == pytest.approx(0.85 * 80 * GIB - taken, abs=1)
    assert memory.token_bytes == 2 * 64 * 2 * 128 * 2  # layers, key heads of a rank, width, bf16
    assert memory.cache_tokens == memory.cache // memory.token_bytes
    assert memory.peak == round(0.85 * 80 * GIB) + memory.tap + memory.transfer


def test_ranks_beyond_the_key_heads_hold_one_each():
    config = configured(engine=8)
    memory = engine_memory(config, released("qwen3-235b-a22b"), Device())
    assert memory.token_bytes == 2 * 94 * 1 * 128 * 2


def test_more_tensor_ranks_leave_more_for_the_cache():
    tokens = [
        engine_memory(configured(engine=size), released("qwen3-32b"), Device()).cache_tokens
        for size in (1, 2, 4, 8)
    ]
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[1]


def test_a_share_smaller_than_the_weights_holds_nothing():
    config = configured()
    config.engine.memory_fraction = 0.5
    assert engine_memory(config, released("qwen3-32b"), Device()).cache_tokens == 0


def test_sorting_for_top_p_costs_and_graphs_lie_beside_the_share():
    config = configured()
    shape = released("qwen3-4b")
    plain = engine_memory(config, shape, Device())
    config.rollout.top_p = 0.9
    config.engine.eager = False
    sorted_ = engine_memory(config, shape, Device())
    assert sorted_.logits - plain.logits == 256 * shape.vocab * 12
    assert sorted_.outside - plain.outside == GIB


def test_on_a_cpu_the_cache_has_its_own_size():
    config = configured()
    memory = engine_memory(config, released("qwen3-4b"), Device(gib=None))
    assert memory.cache == config.engine.kv_cache_gib * GIB
    assert memory.token_bytes == 2 * 36 * 8 * 128 * 4


def test_on_a_cpu_a_bucket_holds_no_more_than_there_is():
    config, shape = configured(), released("qwen3-4b")
    usual = engine_memory(config, shape, Device(gib=None))
    config.weights.bucket_mib = 2**20
    large = engine_memory(config, shape, Device(gib=None))
    assert large.transfer - usual.transfer == 2 * (large.weights - 64 * 2**20)
    assert large.runtime == (45 + 90) * 2**20


def test_on_shared_gpus_it_lies_beside_what_the_policy_leaves():
    config, shape = configured(engine=4), released("qwen3-32b")
    alone = engine_memory(config, shape, Device())
    config.cluster.colocated = True
    shared = engine_memory(config, shape, Device())
    buckets = 2 * 64 * 2**20
    assert shared.peak - alone.peak == shared.neighbour == 3 * GIB + buckets
    assert shared.cache == alone.cache
    # Asleep it has CUDA's context and the link's buckets; no graphs with engine.eager.
    assert shared.asleep == 2 * GIB + buckets
    assert shared.loading == shared.weights + shared.transfer + 2 * GIB
    assert engine_memory(config, shape, Device(gib=None)).neighbour == 0

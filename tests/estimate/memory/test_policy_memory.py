"""The memory of a rank of policy or critic, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.estimate.device import GIB, DeviceSpec
from mega_agentrl.estimate.memory.engine import estimate_engine_memory
from mega_agentrl.estimate.memory.policy import estimate_critic_memory, estimate_policy_memory
from mega_agentrl.estimate.preflight.suggestions import num_required_gpus
from tests.estimate.configs import configured
from tests.estimate.shapes import released


def test_the_peak_is_the_state_and_the_largest_of_the_rest():
    config = configured(tensor=4, sequence_parallel=True)
    (memory,) = estimate_policy_memory(config, released("qwen2.5-7b"), DeviceSpec())
    fixed = memory.weights + memory.gradients + memory.optimizer + 3 * GIB
    assert memory.peak == fixed + memory.training_pass
    assert memory.training_pass == memory.activations + memory.row_tensors + max(
        memory.head_workspace, memory.layer_workspace, memory.path_attention
    )
    config.weight_sync.bucket_mib = 50 * 1024
    (large,) = estimate_policy_memory(config, released("qwen2.5-7b"), DeviceSpec())
    assert large.peak == fixed + 100 * GIB


def test_the_last_stage_alone_has_a_head_and_the_first_most_micro_batches():
    config = configured(tensor=8, pipeline=4, sequence_parallel=True)
    stages = estimate_policy_memory(config, released("qwen2.5-72b"), DeviceSpec())
    assert [memory.stage for memory in stages] == [0, 1, 2, 3]
    assert [bool(memory.head_workspace) for memory in stages] == [False, False, False, True]
    kept = [memory.activations for memory in stages]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == pytest.approx(4 * kept[3], rel=0.05)


def test_a_reference_lies_in_host_memory():
    config = configured(tensor=4)
    shape = released("qwen2.5-7b")
    (without,) = estimate_policy_memory(config, shape, DeviceSpec())
    assert (without.pinned_host, without.reference_staging) == (0, 0)
    config.algo.kl_coef = 0.1
    (memory,) = estimate_policy_memory(config, shape, DeviceSpec())
    assert memory.pinned_host >= memory.weights
    assert memory.reference_staging == 256 * 2**20


def test_the_copy_of_a_checkpoint_lies_in_host_memory():
    config, shape = configured(tensor=4, data=2, engine=1, engines=8), released("qwen2.5-7b")
    (gpu,) = estimate_policy_memory(config, shape, DeviceSpec())
    (cpu,) = estimate_policy_memory(config, shape, DeviceSpec(memory_gib=None))
    assert (gpu.checkpoint_copy, cpu.pinned_checkpoint) == (0, 0)
    # Blocks of 256 MiB, the last one a power of two.
    assert 0 <= gpu.pinned_checkpoint - gpu.optimizer - gpu.weights / 2 < 768 * 2**20
    assert cpu.peak - cpu.checkpoint_copy == replace(cpu, checkpoint_copy=0).peak
    assert cpu.checkpoint_copy > cpu.optimizer
    config.total_steps = 0
    (idle,) = estimate_policy_memory(config, shape, DeviceSpec())
    assert idle.pinned_checkpoint == 0


def test_a_run_that_only_evaluates_has_weights_alone():
    config = configured(tensor=4)
    config.algo.kl_coef = 0.1
    config.total_steps = 0
    (memory,) = estimate_policy_memory(config, released("qwen2.5-7b"), DeviceSpec())
    assert memory.gradients == memory.optimizer == memory.activations == memory.pinned_host == 0
    assert memory.weights > 0


def test_a_cpu_trains_in_float32_and_loads_libraries():
    config = configured(prompt=32, response=96, tokens=512)
    shape = released("qwen3-4b")
    (cpu,) = estimate_policy_memory(config, shape, DeviceSpec(memory_gib=None))
    (gpu,) = estimate_policy_memory(config, shape, DeviceSpec())
    assert cpu.weights == 2 * gpu.weights
    assert cpu.gradients == gpu.gradients
    assert cpu.optimizer == pytest.approx(gpu.optimizer * 2 / 3, rel=1e-4), "no masters"
    assert cpu.runtime == 45 * 2**20
    (fewer,) = estimate_policy_memory(
        config, shape, DeviceSpec(memory_gib=None), micro_batch_tokens=128
    )
    assert fewer.activations == pytest.approx(cpu.activations / 4, rel=1e-3)
    assert fewer.weights == cpu.weights


def test_on_shared_gpus_the_peak_is_that_of_learning_or_of_the_transfer():
    config = configured(tensor=4, data=2, sequence_parallel=True, engine=1, engines=8)
    shape = released("qwen2.5-7b")
    (alone,) = estimate_policy_memory(config, shape, DeviceSpec())
    config.cluster.colocated = True
    (shared,) = estimate_policy_memory(config, shape, DeviceSpec())
    engine, buckets = estimate_engine_memory(config, shape, DeviceSpec()), 2 * 64 * 2**20
    assert shared.sleeping_engine == engine.sleeping_bytes == 3 * GIB + buckets, "graphs, too"
    assert shared.peak == alone.peak + shared.sleeping_engine + buckets
    assert shared.colocated_transfer_peak == (
        (shared.weights + buckets + 3 * GIB) + (engine.weights + engine.transfer + 3 * GIB)
    )
    assert shared.pinned_host == shared.weights + shared.optimizer
    config.weight_sync.bucket_mib = 8 * 1024
    (large,) = estimate_policy_memory(config, shape, DeviceSpec())
    assert large.peak - shared.peak == 4 * (8 * 1024 - 64) * 2**20
    config.total_steps = 0  # weights alone: the moment in which there are two of them
    (small,) = estimate_policy_memory(config, shape, DeviceSpec())
    assert small.peak == small.colocated_transfer_peak > small.weights + engine.weights
    (cpu,) = estimate_policy_memory(config, shape, DeviceSpec(memory_gib=None))
    assert cpu.sleeping_engine == 0


def test_the_critic_is_a_policy_without_its_head_reference_and_transfer():
    config, shape = configured(tensor=4, pipeline=2, sequence_parallel=True), released("qwen2.5-7b")
    assert estimate_critic_memory(config, shape, DeviceSpec()) == []
    assert num_required_gpus(config) == 9
    config.algo.advantage, config.algo.kl_coef = "gae", 0.1
    policy = estimate_policy_memory(config, shape, DeviceSpec())
    critic = estimate_critic_memory(config, shape, DeviceSpec())
    assert num_required_gpus(config) == 17
    # Of 152,064 rows of 3,584 numbers in two bytes, each tensor rank has a quarter.
    first, last = zip(policy, critic, strict=True)
    assert first[0].weights == first[1].weights
    head = last[0].num_parameters - last[1].num_parameters
    assert head == 152_064 * 3_584 // 4 - 3_584
    for memory, other in (first, last):
        assert other.activations == memory.activations
        assert other.head_workspace == other.transfer_buckets == 0
        assert other.reference_staging == other.pinned_host == 0
        assert other.peak <= memory.peak


def test_models_on_the_same_gpus_keep_their_runtime_there_and_their_state_on_the_host():
    config, shape = configured(tensor=4), released("qwen2.5-7b")
    config.algo.advantage = "gae"
    (alone,) = estimate_policy_memory(config, shape, DeviceSpec())
    (critic_alone,) = estimate_critic_memory(config, shape, DeviceSpec())
    config.cluster.colocated_models = True
    (policy,) = estimate_policy_memory(config, shape, DeviceSpec())
    (critic,) = estimate_critic_memory(config, shape, DeviceSpec())
    assert policy.peak == alone.peak + 3 * GIB
    assert policy.pinned_host == policy.weights + policy.optimizer
    assert critic.peak == critic_alone.peak + 3 * GIB + policy.transfer_buckets
    assert critic.pinned_host == critic.weights + critic.optimizer
    assert critic.sleeping_engine == 0
    config.cluster.colocated = True
    (critic,) = estimate_critic_memory(config, shape, DeviceSpec())
    assert critic.sleeping_engine > 0
    engine = estimate_engine_memory(config, shape, DeviceSpec())
    config.cluster.colocated_models = False
    assert engine.colocated_policy == (
        estimate_engine_memory(config, shape, DeviceSpec()).colocated_policy + 3 * GIB
    )


def test_an_evaluation_alone_has_no_critic():
    config = configured()
    config.algo.advantage, config.total_steps = "gae", 0
    assert estimate_critic_memory(config, released("qwen2.5-7b"), DeviceSpec()) == []
    assert num_required_gpus(config) == 2

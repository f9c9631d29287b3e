"""Changes of settings: made on a copy, tried, described; those suggested for policy and engine."""

from __future__ import annotations

import pytest

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.device import GIB, DeviceSpec
from mega_agentrl.estimate.preflight.suggestions import (
    engine_fits,
    get_setting,
    make_change,
    num_required_gpus,
    policy_peak_gib,
    suggest_engine_changes,
    suggest_policy_changes,
    valid_candidates,
    with_overrides,
)
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released


def test_a_change_leaves_the_configuration_alone():
    config = configured(tensor=2)
    other = with_overrides(config, {"parallel.tensor": 4, "engine.gpu_memory_utilization": 0.5})
    assert (get_setting(config, "parallel.tensor"), get_setting(other, "parallel.tensor")) == (2, 4)
    assert get_setting(other, "engine.gpu_memory_utilization") == 0.5
    assert other.engine.tensor_parallel_size == config.engine.tensor_parallel_size


def test_only_what_passes_and_differs_is_tried():
    config = configured(tensor=2)

    def check(other):
        if other.parallel.tensor == 3:
            raise ValueError("3")

    candidates = [{"parallel.tensor": size} for size in (2, 3, 4)]
    assert [settings for settings, _ in valid_candidates(config, candidates, check)] == [
        candidates[2]
    ]


def test_a_broken_check_is_not_taken_for_an_answer():
    def check(_):
        raise TypeError("ours")

    with pytest.raises(TypeError, match="ours"):
        list(valid_candidates(configured(), [{"parallel.tensor": 2}], check))


def test_what_stays_is_not_told_and_gpus_are():
    config = configured(tensor=2, engines=3)
    change = make_change(
        config, {"parallel.tensor": 2, "parallel.data": 4, "parallel.sequence_parallel": True}, 7
    )
    assert change.num_extra_gpus == 6
    assert str(change) == (
        "parallel.data=4 (from 1) with parallel.sequence_parallel=true (from false): 7.0 GiB on 6 "
        "more GPUs"
    )
    assert num_required_gpus(config) == 2 + 3


POLICY_CASES = {
    "long micro-batches": {"tokens": 65536, "tensor": 8, "sequence_parallel": True, "data": 4},
    "copied optimizer": {
        "tensor": 8,
        "sequence_parallel": True,
        "data": 4,
        "distributed_optimizer": False,
    },
    "no sharing": {"tokens": 12288, "tensor": 8, "data": 4},
    "too few ranks": {"tensor": 4, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", POLICY_CASES)
def test_every_policy_change_fits(name):
    config, shape, device = configured(**POLICY_CASES[name]), released("qwen3-32b"), DeviceSpec()
    room = device.usable_bytes / GIB
    assert policy_peak_gib(config, shape, device) > room
    changes = suggest_policy_changes(config, shape, device, check_of(shape))
    assert changes
    for change in changes:
        peak = policy_peak_gib(with_overrides(config, change.new_values), shape, device)
        assert peak == change.peak_gib <= room
    sizes = [(max(0, change.num_extra_gpus), len(change.new_values)) for change in changes]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("long micro-batches", "optim.micro_batch_tokens"),
        ("copied optimizer", "parallel.distributed_optimizer"),
        ("no sharing", "parallel.sequence_parallel"),
    ],
)
def test_the_nearest_change_comes_first(name, key):
    config = configured(**POLICY_CASES[name])
    first = suggest_policy_changes(
        config, released("qwen3-32b"), DeviceSpec(), check_of(released("qwen3-32b"))
    )[0]
    assert list(first.new_values) == [key]
    assert first.num_extra_gpus == 0


def test_the_micro_batch_is_the_largest_that_fits():
    config, shape = configured(**POLICY_CASES["long micro-batches"]), released("qwen3-32b")
    first = suggest_policy_changes(config, shape, DeviceSpec(), check_of(shape))[0]
    tokens = first.new_values["optim.micro_batch_tokens"]
    assert tokens % 128 == 0
    more = with_overrides(config, {"optim.micro_batch_tokens": tokens + 256})
    assert policy_peak_gib(more, shape, DeviceSpec()) > DeviceSpec().usable_bytes / GIB


def test_experts_go_over_more_ranks():
    config = configured(tokens=4096, response=2048, data=8)
    config.parallel = ParallelConfig(
        tensor=4, sequence_parallel=True, context=4, data=8, pipeline=2, expert=2
    )
    shape = released("qwen3-235b-a22b")
    first = suggest_policy_changes(config, shape, DeviceSpec(), check_of(shape))[0]
    assert list(first.new_values) == ["parallel.expert"]


def test_no_answer_is_given_that_the_check_refuses():
    def check(config):
        if config.parallel != layout:
            raise ValueError("fixed")

    config = configured(**POLICY_CASES["no sharing"])
    layout = config.parallel
    assert suggest_policy_changes(config, released("qwen3-32b"), DeviceSpec(), check) == []


def broken(name):
    config = configured(engine=4, engines=8)
    match name:
        case "share too large":
            config.engine.gpu_memory_utilization = 0.98
        case "share too small":
            config.engine.gpu_memory_utilization = 0.2
        case "weights too large":
            config.engine.tensor_parallel_size, config.engine.gpu_memory_utilization = 1, 0.75
        case "buckets too large":
            config.weight_sync.bucket_mib = 8192
    return config


ENGINE_CASES = {
    "share too large": "engine.gpu_memory_utilization",
    "share too small": "engine.gpu_memory_utilization",
    "weights too large": "engine.gpu_memory_utilization",
    "buckets too large": "engine.gpu_memory_utilization",
}


@pytest.mark.parametrize("name", ENGINE_CASES)
def test_every_engine_change_fits_and_the_nearest_comes_first(name):
    config, shape = broken(name), released("qwen3-32b")
    assert not engine_fits(config, shape, DeviceSpec())
    changes = suggest_engine_changes(config, shape, DeviceSpec(), check_of(shape))
    assert list(changes[0].new_values) == [ENGINE_CASES[name]]
    for change in changes:
        assert engine_fits(with_overrides(config, change.new_values), shape, DeviceSpec())
    assert changes[0].num_extra_gpus == 0


def test_tensor_ranks_are_taken_from_the_number_of_engines():
    config, shape = configured(engine=4, engines=64), released("qwen3-235b-a22b")
    first = suggest_engine_changes(config, shape, DeviceSpec(), check_of(shape))[0]
    assert first.new_values == {"engine.tensor_parallel_size": 8, "cluster.num_engines": 32}
    assert first.num_extra_gpus == 0


def test_an_engine_that_fits_needs_no_change():
    assert engine_fits(configured(engine=4), released("qwen3-32b"), DeviceSpec())


def test_nothing_helps_a_gpu_that_is_far_too_small():
    config = configured()
    assert (
        suggest_engine_changes(
            config,
            released("qwen3-235b-a22b"),
            DeviceSpec(memory_gib=8),
            check_of(released("qwen3-235b-a22b")),
        )
        == []
    )

"""Changes that make an engine fit."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.preflight.config_change import with_overrides
from mega_agentrl.estimate.preflight.engine_suggestions import engine_fits, suggest_engine_changes
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released


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


CASES = {
    "share too large": "engine.gpu_memory_utilization",
    "share too small": "engine.gpu_memory_utilization",
    "weights too large": "engine.gpu_memory_utilization",
    "buckets too large": "engine.gpu_memory_utilization",
}


@pytest.mark.parametrize("name", CASES)
def test_every_answer_fits_and_the_nearest_comes_first(name):
    config, shape = broken(name), released("qwen3-32b")
    assert not engine_fits(config, shape, DeviceSpec())
    changes = suggest_engine_changes(config, shape, DeviceSpec(), check_of(shape))
    assert list(changes[0].new_values) == [CASES[name]]
    for change in changes:
        assert engine_fits(with_overrides(config, change.new_values), shape, DeviceSpec())
    assert changes[0].num_extra_gpus == 0


def test_tensor_ranks_are_taken_from_the_number_of_engines():
    config, shape = configured(engine=4, engines=64), released("qwen3-235b-a22b")
    first = suggest_engine_changes(config, shape, DeviceSpec(), check_of(shape))[0]
    assert first.new_values == {"engine.tensor_parallel_size": 8, "cluster.num_engines": 32}
    assert first.num_extra_gpus == 0


def test_what_fits_needs_no_change():
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

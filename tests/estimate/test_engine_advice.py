"""Changes that make an engine fit."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.change import changed
from mega_agentrl.estimate.device import Device
from mega_agentrl.estimate.engine_advice import engine_changes, engine_fits
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released


def broken(name):
    config = configured(engine=4, engines=8)
    match name:
        case "share too large":
            config.engine.memory_fraction = 0.98
        case "share too small":
            config.engine.memory_fraction = 0.2
        case "weights too large":
            config.engine.tensor, config.engine.memory_fraction = 1, 0.75
        case "buckets too large":
            config.weights.bucket_mib = 8192
    return config


CASES = {
    "share too large": "engine.memory_fraction",
    "share too small": "engine.memory_fraction",
    "weights too large": "engine.memory_fraction",
    "buckets too large": "engine.memory_fraction",
}


@pytest.mark.parametrize("name", CASES)
def test_every_answer_fits_and_the_nearest_comes_first(name):
    config, shape = broken(name), released("qwen3-32b")
    assert not engine_fits(config, shape, Device())
    changes = engine_changes(config, shape, Device(), check_of(shape))
    assert list(changes[0].settings) == [CASES[name]]
    for change in changes:
        assert engine_fits(changed(config, change.settings), shape, Device())
    assert changes[0].num_gpus == 0


def test_tensor_ranks_are_taken_from_the_number_of_engines():
    config, shape = configured(engine=4, engines=64), released("qwen3-235b-a22b")
    first = engine_changes(config, shape, Device(), check_of(shape))[0]
    assert first.settings == {"engine.tensor": 8, "cluster.num_engines": 32}
    assert first.num_gpus == 0


def test_what_fits_needs_no_change():
    assert engine_fits(configured(engine=4), released("qwen3-32b"), Device())


def test_nothing_helps_a_gpu_that_is_far_too_small():
    config = configured()
    assert (
        engine_changes(
            config,
            released("qwen3-235b-a22b"),
            Device(gib=8),
            check_of(released("qwen3-235b-a22b")),
        )
        == []
    )

"""Changes of settings: made on a copy, tried, described."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.preflight.config_change import (
    get_setting,
    make_change,
    num_required_gpus,
    valid_candidates,
    with_overrides,
)
from tests.estimate.configs import configured


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

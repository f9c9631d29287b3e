"""Changes that make a policy fit: each fits, the nearest first."""

from __future__ import annotations

import pytest

from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.device import GIB, DeviceSpec
from mega_agentrl.estimate.preflight.config_change import with_overrides
from mega_agentrl.estimate.preflight.policy_suggestions import (
    policy_peak_gib,
    suggest_policy_changes,
)
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released

CASES = {
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


@pytest.mark.parametrize("name", CASES)
def test_every_answer_fits(name):
    config, shape, device = configured(**CASES[name]), released("qwen3-32b"), DeviceSpec()
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
    config = configured(**CASES[name])
    first = suggest_policy_changes(
        config, released("qwen3-32b"), DeviceSpec(), check_of(released("qwen3-32b"))
    )[0]
    assert list(first.new_values) == [key]
    assert first.num_extra_gpus == 0


def test_the_micro_batch_is_the_largest_that_fits():
    config, shape = configured(**CASES["long micro-batches"]), released("qwen3-32b")
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

    config = configured(**CASES["no sharing"])
    layout = config.parallel
    assert suggest_policy_changes(config, released("qwen3-32b"), DeviceSpec(), check) == []

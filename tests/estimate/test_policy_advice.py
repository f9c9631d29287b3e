"""Changes that make a policy fit: each fits, the nearest first."""

from __future__ import annotations

import pytest

from mega_agentrl.config.policy_schema import ParallelConfig
from mega_agentrl.estimate.change import changed
from mega_agentrl.estimate.device import GIB, Device
from mega_agentrl.estimate.policy_advice import policy_changes, policy_peak
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released

CASES = {
    "long micro-batches": {"tokens": 65536, "tensor": 8, "sequence": True, "data": 4},
    "copied optimizer": {"tensor": 8, "sequence": True, "data": 4, "distributed_optimizer": False},
    "no sharing": {"tokens": 12288, "tensor": 8, "data": 4},
    "too few ranks": {"tensor": 4, "sequence": True},
}


@pytest.mark.parametrize("name", CASES)
def test_every_answer_fits(name):
    config, shape, device = configured(**CASES[name]), released("qwen3-32b"), Device()
    room = device.usable_bytes / GIB
    assert policy_peak(config, shape, device) > room
    changes = policy_changes(config, shape, device, check_of(shape))
    assert changes
    for change in changes:
        peak = policy_peak(changed(config, change.settings), shape, device)
        assert peak == change.gib <= room
    sizes = [(max(0, change.num_gpus), len(change.settings)) for change in changes]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("long micro-batches", "optim.micro_batch_tokens"),
        ("copied optimizer", "parallel.distributed_optimizer"),
        ("no sharing", "parallel.sequence"),
    ],
)
def test_the_nearest_change_comes_first(name, key):
    config = configured(**CASES[name])
    first = policy_changes(
        config, released("qwen3-32b"), Device(), check_of(released("qwen3-32b"))
    )[0]
    assert list(first.settings) == [key]
    assert first.num_gpus == 0


def test_the_micro_batch_is_the_largest_that_fits():
    config, shape = configured(**CASES["long micro-batches"]), released("qwen3-32b")
    first = policy_changes(config, shape, Device(), check_of(shape))[0]
    tokens = first.settings["optim.micro_batch_tokens"]
    assert tokens % 128 == 0
    more = changed(config, {"optim.micro_batch_tokens": tokens + 256})
    assert policy_peak(more, shape, Device()) > Device().usable_bytes / GIB


def test_experts_go_over_more_ranks():
    config = configured(tokens=4096, response=2048, data=8)
    config.parallel = ParallelConfig(
        tensor=4, sequence=True, context=4, data=8, pipeline=2, expert=2
    )
    shape = released("qwen3-235b-a22b")
    first = policy_changes(config, shape, Device(), check_of(shape))[0]
    assert list(first.settings) == ["parallel.expert"]


def test_no_answer_is_given_that_the_check_refuses():
    def check(config):
        if config.parallel != layout:
            raise ValueError("fixed")

    config = configured(**CASES["no sharing"])
    layout = config.parallel
    assert policy_changes(config, released("qwen3-32b"), Device(), check) == []

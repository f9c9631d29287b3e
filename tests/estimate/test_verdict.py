"""The whole judgement: what stands in the way, under which key."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.device import Device
from mega_agentrl.estimate.verdict import judge
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released

GOOD = {"tensor": 8, "sequence": True, "data": 4, "engine": 4, "engines": 8}


def problems(num_gpus=None, **changes):
    config = configured(**(GOOD | changes))
    return judge(
        config, released("qwen3-32b"), Device(), check_of(released("qwen3-32b")), num_gpus=num_gpus
    ).problems


def test_a_good_configuration_has_no_problem():
    verdict = judge(
        configured(**GOOD),
        released("qwen3-32b"),
        Device(),
        check_of(released("qwen3-32b")),
        num_gpus=64,
    )
    assert verdict.problems == []
    assert verdict.num_gpus == 64
    assert "trajectories of full length" in verdict.notes[0]


@pytest.mark.parametrize("key", ["parallel.tensor", "engine.tensor"])
def test_a_tensor_group_is_inside_one_machine(key):
    side = {"parallel.tensor": "tensor", "engine.tensor": "engine"}[key]
    (problem,) = problems(**{side: 16})
    assert problem.key == key
    assert f"{key}=16: expected at most 8" in problem.message
    assert problem.changes == (f"{key}=8 (from 16)",)


def test_more_gpus_than_there_are():
    (problem,) = problems(num_gpus=64, engines=9)
    assert problem.key == "cluster.num_engines"
    assert "68 GPUs needed" in problem.message
    assert problem.changes == ("cluster.num_engines=8 (from 9)",)
    (problem,) = problems(num_gpus=32)
    assert problem.key == "parallel.data"


def test_a_policy_that_does_not_fit_names_the_first_change():
    (problem,) = problems(tokens=65536)
    assert problem.key == "optim.micro_batch_tokens"
    assert problem.changes[0].startswith("optim.micro_batch_tokens=")
    assert "(from 65536)" in problem.changes[0]
    assert "of 76.8 usable" in problem.message


def test_no_change_needs_a_machine_that_is_not_there():
    (problem,) = problems(num_gpus=64, tokens=65536)
    assert not any("more GPUs" in change for change in problem.changes)
    assert not any("parallel.tensor=16" in change for change in problem.changes)


def test_both_sides_may_have_a_problem():
    config, shape = configured(**(GOOD | {"tokens": 65536, "engine": 1})), released("qwen3-32b")
    config.engine.memory_fraction = 0.75
    found = judge(config, shape, Device(), check_of(shape)).problems
    assert [problem.key for problem in found] == [
        "optim.micro_batch_tokens",
        "engine.memory_fraction",
    ]
    assert "room for 0 tokens of KV cache" in found[1].message


def test_a_cpu_has_room_for_anything():
    config = configured(**(GOOD | {"tokens": 65536}))
    verdict = judge(
        config, released("qwen3-32b"), Device(gib=None), check_of(released("qwen3-32b"))
    )
    assert verdict.problems == []

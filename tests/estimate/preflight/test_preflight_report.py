"""The whole preflight: which problems are found, under which key."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.preflight.report import _placement_problems, run_preflight
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released

GOOD = {"tensor": 8, "sequence_parallel": True, "data": 4, "engine": 4, "engines": 8}


def problems(num_gpus=None, **changes):
    config = configured(**(GOOD | changes))
    return run_preflight(
        config,
        released("qwen3-32b"),
        DeviceSpec(),
        check_of(released("qwen3-32b")),
        num_gpus=num_gpus,
    ).problems


def test_a_good_configuration_has_no_problem():
    report = run_preflight(
        configured(**GOOD),
        released("qwen3-32b"),
        DeviceSpec(),
        check_of(released("qwen3-32b")),
        num_gpus=64,
    )
    assert report.problems == []
    assert report.num_gpus == 64
    assert "trajectories of full length" in report.notes[0]


@pytest.mark.parametrize("key", ["parallel.tensor", "engine.tensor_parallel_size"])
def test_a_tensor_group_is_inside_one_machine(key):
    side = {"parallel.tensor": "tensor", "engine.tensor_parallel_size": "engine"}[key]
    (problem,) = problems(**{side: 16})
    assert problem.config_key == key
    assert f"{key}=16: expected at most 8" in problem.message
    assert problem.suggestions == (f"{key}=8 (from 16)",)


def test_more_gpus_than_there_are():
    (problem,) = problems(num_gpus=64, engines=9)
    assert problem.config_key == "cluster.num_engines"
    assert "68 GPUs needed" in problem.message
    assert problem.suggestions == ("cluster.num_engines=8 (from 9)",)
    (problem,) = problems(num_gpus=32)
    assert problem.config_key == "parallel.data"


def test_a_policy_that_does_not_fit_names_the_first_change():
    (problem,) = problems(tokens=65536)
    assert problem.config_key == "optim.micro_batch_tokens"
    assert problem.suggestions[0].startswith("optim.micro_batch_tokens=")
    assert "(from 65536)" in problem.suggestions[0]
    assert "of 76.8 usable" in problem.message


def test_no_change_needs_a_machine_that_is_not_there():
    (problem,) = problems(num_gpus=64, tokens=65536)
    assert not any("more GPUs" in change for change in problem.suggestions)
    assert not any("parallel.tensor=16" in change for change in problem.suggestions)


def test_both_sides_may_have_a_problem():
    config, shape = configured(**(GOOD | {"tokens": 65536, "engine": 1})), released("qwen3-32b")
    config.engine.gpu_memory_utilization = 0.75
    found = run_preflight(config, shape, DeviceSpec(), check_of(shape)).problems
    assert [problem.config_key for problem in found] == [
        "optim.micro_batch_tokens",
        "engine.gpu_memory_utilization",
    ]
    assert "room for 0 tokens of KV cache" in found[1].message


def test_a_cpu_has_room_for_anything():
    config = configured(**(GOOD | {"tokens": 65536}))
    report = run_preflight(
        config, released("qwen3-32b"), DeviceSpec(memory_gib=None), check_of(released("qwen3-32b"))
    )
    assert report.problems == []


SHARED = {"tensor": 8, "sequence_parallel": True, "data": 8, "engine": 4, "engines": 16}


def shared_problems(fraction, *, num_gpus=None, device=None, **changes):
    config, shape = configured(**(SHARED | changes)), released("qwen3-32b")
    config.cluster.colocated, config.engine.gpu_memory_utilization = True, fraction
    device = device or DeviceSpec()
    return run_preflight(config, shape, device, check_of(shape), num_gpus=num_gpus).problems


def test_shared_gpus_are_counted_once():
    assert shared_problems(0.8, num_gpus=64) == []
    (problem,) = shared_problems(0.8, num_gpus=32)
    assert problem.config_key == "parallel.data"
    assert "64 GPUs needed, which engines share, 32 there" in problem.message


def test_the_share_of_an_engine_leaves_room_for_the_policy_off_the_gpu():
    (problem,) = shared_problems(0.93)
    assert problem.config_key == "engine.gpu_memory_utilization"
    assert "what the policy, off the GPU, leaves there" in problem.message
    assert problem.suggestions[0].startswith("engine.gpu_memory_utilization=0.")
    config = configured(**SHARED)
    config.engine.gpu_memory_utilization = 0.93  # it does fit a GPU of its own
    shape = released("qwen3-32b")
    assert run_preflight(config, shape, DeviceSpec(), check_of(shape)).problems == []


def test_a_policy_beside_a_sleeping_engine_names_it():
    (problem,) = shared_problems(0.8, tokens=32768)
    assert problem.config_key == "optim.micro_batch_tokens"
    assert "what a sleeping engine leaves there" in problem.message


def test_weights_of_both_that_do_not_fit_are_a_problem_of_the_transfer():
    config, shape = configured(**SHARED), released("qwen3-32b")
    config.cluster.colocated, config.total_steps = True, 0
    # 8 GiB of the policy and 16 of the engine, both with CUDA and buckets.
    found = run_preflight(config, shape, DeviceSpec(memory_gib=28.0), check_of(shape)).problems
    assert "while weights are sent: its own and those of the engine" in found[0].message


def test_whole_engines_and_tensor_groups_fit_one_machine():
    config = configured(tensor=4, data=3, engine=6, engines=2)
    config.cluster.colocated = True
    (problem,) = _placement_problems(config, DeviceSpec(gpus_per_node=6), None)
    assert problem.config_key == "engine.tensor_parallel_size"
    assert "12 ranks belong on one machine, expected at most 6" in problem.message

"""The preflight: which problems are found, under which key."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.preflight.report import _placement_problems, run_preflight, tree_note
from tests.estimate.configs import check_of, configured
from tests.estimate.shapes import released

GOOD = {"tensor": 8, "sequence_parallel": True, "data": 4, "engine": 4, "engines": 8}


def preflight(config, device=None, num_gpus=None):
    shape = released("qwen3-32b")
    return run_preflight(config, shape, device or DeviceSpec(), check_of(shape), num_gpus=num_gpus)


def problems(num_gpus=None, **changes):
    return preflight(configured(**(GOOD | changes)), num_gpus=num_gpus).problems


def test_a_good_configuration_has_no_problem():
    report = preflight(configured(**GOOD), num_gpus=64)
    assert (report.problems, report.num_gpus) == ([], 64)
    assert "full length" in report.notes[0]


@pytest.mark.parametrize(
    ("side", "key"), [("tensor", "parallel.tensor"), ("engine", "engine.tensor_parallel_size")]
)
def test_a_tensor_group_is_inside_one_machine(side, key):
    (problem,) = problems(**{side: 16})
    assert problem.config_key == key
    assert problem.suggestions == (f"{key}=8 (from 16)",)


def test_a_run_that_needs_more_gpus_than_there_are_has_a_problem():
    (problem,) = problems(num_gpus=64, engines=9)
    assert problem.config_key == "cluster.num_engines"
    assert "68 GPUs" in problem.message
    assert problem.suggestions == ("cluster.num_engines=8 (from 9)",)
    (problem,) = problems(num_gpus=32)
    assert problem.config_key == "parallel.data"


def test_a_policy_that_does_not_fit_is_a_problem():
    (problem,) = problems(tokens=65536)
    assert problem.config_key == "optim.micro_batch_tokens"
    assert problem.suggestions[0].startswith("optim.micro_batch_tokens=")
    assert "(from 65536)" in problem.suggestions[0] and "76.8" in problem.message


def test_no_change_needs_more_gpus_than_there_are():
    (problem,) = problems(num_gpus=64, tokens=65536)
    text = " ".join(problem.suggestions)
    assert "more GPUs" not in text and "parallel.tensor=16" not in text


def test_both_sides_may_have_a_problem():
    config = configured(**(GOOD | {"tokens": 65536, "engine": 1}))
    config.engine.gpu_memory_utilization = 0.75
    policy, engine = preflight(config).problems
    assert policy.config_key == "optim.micro_batch_tokens"
    assert engine.config_key == "engine.gpu_memory_utilization"
    assert "room for 0 tokens" in engine.message


def test_a_cpu_has_room_for_anything():
    config = configured(**(GOOD | {"tokens": 65536}))
    assert preflight(config, DeviceSpec(memory_gib=None)).problems == []


SHARED = {"tensor": 8, "sequence_parallel": True, "data": 8, "engine": 4, "engines": 16}


def shared_problems(fraction, *, num_gpus=None, **changes):
    config = configured(**(SHARED | changes))
    config.cluster.colocated, config.engine.gpu_memory_utilization = True, fraction
    return preflight(config, num_gpus=num_gpus).problems


def test_shared_gpus_are_counted_once():
    assert shared_problems(0.8, num_gpus=64) == []
    (problem,) = shared_problems(0.8, num_gpus=32)
    assert problem.config_key == "parallel.data"
    assert "64 GPUs" in problem.message


def test_the_share_of_an_engine_leaves_room_for_the_policy_off_the_gpu():
    (problem,) = shared_problems(0.93)
    assert problem.config_key == "engine.gpu_memory_utilization"
    assert "offloaded policy" in problem.message
    assert problem.suggestions[0].startswith("engine.gpu_memory_utilization=0.")
    config = configured(**SHARED)
    config.engine.gpu_memory_utilization = 0.93  # it does fit a GPU of its own
    assert preflight(config).problems == []


def test_a_policy_that_does_not_fit_beside_a_sleeping_engine_is_a_problem():
    (problem,) = shared_problems(0.8, tokens=32768)
    assert problem.config_key == "optim.micro_batch_tokens"
    assert "sleeping engine" in problem.message


def test_weights_of_both_that_do_not_fit_are_a_problem_of_the_transfer():
    config = configured(**SHARED)
    config.cluster.colocated, config.total_steps = True, 0
    # 8 GiB of the policy and 16 of the engine, both with CUDA and buckets.
    problem, *_ = preflight(config, DeviceSpec(memory_gib=28.0)).problems
    assert "during the weight transfer" in problem.message


def test_whole_engines_and_tensor_groups_fit_one_machine():
    config = configured(tensor=4, data=3, engine=6, engines=2)
    config.cluster.colocated = True
    (problem,) = _placement_problems(config, DeviceSpec(gpus_per_node=6), None)
    assert problem.config_key == "engine.tensor_parallel_size"
    assert "12 ranks" in problem.message


def note_of(mean_prompt_tokens=2000.0, *, trees=True, group=16, steps=10, **settings):
    """The line on trees of a run with responses of 1,000 tokens."""
    config = configured(response=1000, **settings)
    config.batch.trees, config.rollout.group_size, config.total_steps = trees, group, steps
    return tree_note(config, mean_prompt_tokens)


def test_shared_prompts_are_saved_at_least():
    """16 x 3,000 tokens in flat rows, 2,000 + 16 x 1,000 in a tree."""
    note = note_of(tokens=18_000)
    assert "prompts of 2000 tokens on average tree/token_ratio is at least 2.67, higher" in note
    assert "shorter than 1000 tokens" in note
    # Five rows fit beside the prompt, so that it is computed four times.
    assert "at least 2.67 (about 2.00 as computed" in note_of(tokens=7_500)
    assert "about 2.00" in note_of(tokens=3_750, context=2)
    assert "about 1.00" in note_of(tokens=3_000), "one row for each part"


@pytest.mark.parametrize(
    "settings",
    [{"trees": False}, {"group": 1}, {"steps": 0}],
    ids=["flat_rows", "one_trajectory", "no_training"],
)
def test_no_saving_is_estimated_where_no_tree_is_trained_on(settings):
    assert note_of(**settings) is None

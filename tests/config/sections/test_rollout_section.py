"""Ranges of `rollout.*` and `rollout.branch.*`."""

import math

import pytest

from mega_agentrl.config.enums import FilterMetric, ForkBudgetMode
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from tests.config.refusals import refused_setting


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha", math.inf),
        ("beta", math.nan),
        ("tau", -math.inf),
        ("consecutive_penalty", -0.1),
        ("consecutive_penalty", 1.1),
        ("num_probe_tokens", -1),
        ("initial_rollouts", 0),
        ("num_forks_per_decision", -1),
        ("entropy_estimate_top_k", -1),
        ("entropy_estimate_top_k", 21),
    ],
)
def test_branch_settings_out_of_range(key, value):
    key, got = f"rollout.branch.{key}", refused_setting(BranchConfig, **{key: value})
    assert got[0] == key
    assert got[1] is value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("filter_range", [math.nan, 0.9]),
        ("filter_range", [0.99, 0.99]),
        ("filter_range", [0.0, math.inf]),
        ("filter_range", [0.5]),
        ("num_oversampled_prompts", -1),
        ("min_finished_fraction", 0.0),
        ("min_finished_fraction", 1.5),
        ("straggler_timeout_s", -1.0),
        ("straggler_timeout_s", math.inf),
    ],
)
def test_group_settings_out_of_range(key, value):
    got = refused_setting(RolloutConfig, **{key: value})
    assert got[0] == f"rollout.{key}"
    assert got[1] is value


def test_a_fraction_needs_a_timeout_and_partial_rollout_excludes_a_trajectory_timeout():
    timeout = ("rollout.straggler_timeout_s", 0.0)
    assert refused_setting(RolloutConfig, min_finished_fraction=0.5) == timeout
    RolloutConfig(min_finished_fraction=0.5, straggler_timeout_s=1.0)
    limits = {"partial_rollout": True, "trajectory_timeout_s": 60.0}
    assert refused_setting(RolloutConfig, **limits) == ("rollout.trajectory_timeout_s", 60.0)


def test_boundary_values_pass():
    BranchConfig(consecutive_penalty=0, num_forks_per_decision=0, initial_rollouts=1)
    BranchConfig(num_probe_tokens=0, consecutive_penalty=1)
    RolloutConfig(top_p=1.0, max_tool_calls=0, group_size=1)


def test_defaults_are_the_papers_constants_and_filter_nothing():
    branch = BranchConfig()
    assert (branch.alpha, branch.beta, branch.tau, branch.num_probe_tokens) == (0.5, 0.2, 0.5, 20)
    assert branch.consecutive_penalty == 0.05
    assert branch.fork_budget is ForkBudgetMode.partitioned and branch.num_forks_per_decision == 1
    config = RolloutConfig()
    assert config.filter_metric is FilterMetric.none
    assert config.filter_range == [0.01, 0.99]
    assert config.num_oversampled_prompts == 0
    assert config.min_finished_fraction == 1
    assert not config.partial_rollout

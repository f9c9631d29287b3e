"""`rollout.branch.*`: ranges, with the key and the value in the error."""

from __future__ import annotations

import math

import pytest

from mega_agentrl.config.enums import ForkBudgetMode
from mega_agentrl.config.sections.branching import BranchConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha", math.inf),
        ("beta", math.nan),
        ("tau", -math.inf),
        ("consecutive_penalty", -0.1),
        ("consecutive_penalty", 1.1),
        ("num_probe_tokens", 0),
        ("initial_rollouts", 0),
        ("num_forks_per_decision", -1),
        ("entropy_estimate_top_k", -1),
        ("entropy_estimate_top_k", 21),
    ],
)
def test_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"rollout\.branch\.{key}={value}: expected"):
        BranchConfig(**{key: value})


def test_the_papers_constants_are_the_defaults():
    config = BranchConfig()
    assert (config.alpha, config.beta, config.tau, config.num_probe_tokens) == (0.5, 0.2, 0.5, 20)
    assert config.consecutive_penalty == 0.05
    assert config.fork_budget is ForkBudgetMode.partitioned and config.num_forks_per_decision == 1


def test_boundary_values_pass():
    BranchConfig(consecutive_penalty=0, num_forks_per_decision=0, initial_rollouts=1)
    BranchConfig(num_probe_tokens=1, consecutive_penalty=1)

"""`rollout.branch.*`: ranges, with the key and the value in the error."""

from __future__ import annotations

import math

import pytest

from mega_agentrl.config.branch_schema import BranchConfig
from mega_agentrl.config.choices import Budget


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha", math.inf),
        ("beta", math.nan),
        ("tau", -math.inf),
        ("penalty", -0.1),
        ("penalty", 1.1),
        ("probe_tokens", 0),
        ("initial_rollouts", 0),
        ("forks_per_decision", -1),
        ("estimate_top_k", -1),
        ("estimate_top_k", 21),
    ],
)
def test_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"rollout\.branch\.{key}={value}: expected"):
        BranchConfig(**{key: value})


def test_the_papers_constants_are_the_defaults():
    config = BranchConfig()
    assert (config.alpha, config.beta, config.tau, config.probe_tokens) == (0.5, 0.2, 0.5, 20)
    assert config.penalty == 0.05
    assert config.budget is Budget.partitioned and config.forks_per_decision == 1


def test_boundary_values_pass():
    BranchConfig(penalty=0, forks_per_decision=0, initial_rollouts=1)
    BranchConfig(probe_tokens=1, penalty=1)

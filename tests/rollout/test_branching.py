"""`rollout.branching`: the law at its threshold, and budgets that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.choices import Branching
from mega_agentrl.config.schema import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching import (
    AfterResult,
    ForkPoint,
    NoBranching,
    make_policy,
    split_evenly,
)


def _point(entropies, baseline=1.0, slots=8):
    return ForkPoint(path=(0,), slots=slots, baseline=baseline, probe_entropies=entropies)


@pytest.mark.parametrize(("entropy", "forks"), [(1.0, 0), (1.05, 1), (0.5, 0), (3.0, 1)])
def test_forks_only_when_entropy_rose(entropy, forks):
    assert AfterResult(BranchConfig()).num_forks(_point([entropy] * 20)) == forks


def test_only_the_first_k_tokens_count_and_five_are_needed():
    policy = AfterResult(BranchConfig())
    assert policy.baseline([1.0] * 20 + [100.0]) == 1.0
    assert policy.baseline([1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0
    assert policy.baseline([1.0] * 4) is None
    assert policy.num_forks(_point([9.0] * 4)) == 0
    assert policy.num_forks(_point([9.0] * 5)) == 1


def test_forks_are_bounded_by_the_slots():
    policy = AfterResult(BranchConfig(forks_per_decision=3))
    assert policy.num_forks(_point([9.0] * 20)) == 3
    assert policy.num_forks(_point([9.0] * 20, slots=2)) == 2


@pytest.mark.parametrize(
    ("num_trajectories", "roots", "slots"),
    [
        (8, None, (1, 1, 1, 1)),
        (8, 3, (2, 2, 1)),
        (7, None, (2, 1, 1)),
        (1, None, (0,)),
        (4, 4, (0,) * 4),
    ],
)
def test_slots_of_the_roots(num_trajectories, roots, slots):
    policy = AfterResult(BranchConfig(initial_rollouts=roots))
    assert policy.fork_slots(num_trajectories) == slots


def test_more_roots_than_trajectories_is_an_error():
    with pytest.raises(ValueError, match="initial_rollouts=9: expected between 1 and"):
        AfterResult(BranchConfig(initial_rollouts=9)).fork_slots(8)


def test_none_is_independent_roots():
    policy = NoBranching()
    assert policy.fork_slots(3) == (0, 0, 0) and policy.probe_tokens == 0
    assert policy.baseline([1.0] * 20) is None and policy.num_forks(_point([9.0] * 20)) == 0


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_keeps_the_sum_and_favours_the_first(total, num_parts):
    parts = split_evenly(total, num_parts)
    assert len(parts) == num_parts and sum(parts) == total
    assert sorted(parts, reverse=True) == list(parts) and parts[0] - parts[-1] <= 1


def test_policy_by_name():
    assert isinstance(make_policy(RolloutConfig(branching=Branching.none)), NoBranching)
    policy = make_policy(RolloutConfig(branch=BranchConfig(probe_tokens=7)))
    assert policy.probe_tokens == 7

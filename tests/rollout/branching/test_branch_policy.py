"""Branch policies at their threshold, and fork budgets that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import ForkBudgetMode
from mega_agentrl.config.sections.branching import BranchConfig
from mega_agentrl.rollout.branching.policy import (
    ArpoBranching,
    ForkPoint,
    NoBranching,
    PathBudget,
    SharedBudget,
    make_root_budgets,
    split_evenly,
)


def _point(entropies, baseline=1.0, slots=8):
    return ForkPoint(path=(0,), num_slots=slots, baseline=baseline, probe_entropies=entropies)


@pytest.mark.parametrize(("entropy", "forks"), [(1.0, 0), (1.05, 1), (0.5, 0), (3.0, 1)])
def test_forks_only_when_entropy_rose(entropy, forks):
    assert ArpoBranching(BranchConfig()).num_forks(_point([entropy] * 20)) == forks


def test_probability_and_threshold():
    policy = ArpoBranching(BranchConfig(alpha=0.4, beta=0.3, tau=0.7))
    assert policy.probability(_point([3.0] * 20)) == pytest.approx(0.4 + 0.3 * 2)
    assert policy.probability(_point([3.0] * 4)) is None and policy.threshold == 0.7
    assert not policy.needs_monitor_root(8)


def test_zero_forks_per_decision_never_forks():
    assert ArpoBranching(BranchConfig(num_forks_per_decision=0)).num_forks(_point([9.0] * 20)) == 0


def test_only_the_first_k_tokens_count_and_five_are_needed():
    policy = ArpoBranching(BranchConfig())
    assert policy.baseline_entropy([1.0] * 20 + [100.0]) == 1.0
    assert policy.baseline_entropy([1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0
    assert policy.baseline_entropy([1.0] * 4) is None
    assert policy.num_forks(_point([9.0] * 4)) == 0
    assert policy.num_forks(_point([9.0] * 5)) == 1


def test_forks_are_bounded_by_the_slots():
    policy = ArpoBranching(BranchConfig(num_forks_per_decision=3))
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
    policy = ArpoBranching(BranchConfig(initial_rollouts=roots))
    assert policy.fork_slots(num_trajectories) == slots


def test_more_roots_than_trajectories_is_an_error():
    with pytest.raises(ValueError, match="initial_rollouts=9: expected between 1 and"):
        ArpoBranching(BranchConfig(initial_rollouts=9)).fork_slots(8)


def test_none_is_independent_roots():
    policy = NoBranching()
    assert policy.fork_slots(3) == (0, 0, 0) and policy.num_probe_tokens == 0
    assert policy.baseline_entropy([1.0] * 20) is None and policy.num_forks(_point([9.0] * 20)) == 0
    assert policy.probability(_point([9.0] * 20)) is policy.threshold is None
    assert not policy.needs_monitor_root(8)


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_keeps_the_sum_and_favours_the_first(total, num_parts):
    parts = split_evenly(total, num_parts)
    assert len(parts) == num_parts and sum(parts) == total
    assert sorted(parts, reverse=True) == list(parts) and parts[0] - parts[-1] <= 1


def test_a_path_budget_is_split_in_path_order_and_a_shared_one_is_not():
    budget = PathBudget(6)
    children = budget.spend(2)
    assert budget.num_left == 2 and children == [PathBudget(1), PathBudget(1)]
    shared = SharedBudget(6)
    (child,) = shared.spend(1)
    assert child is shared and child.spend(3) == [shared] * 3 and shared.num_left == 2


@given(st.integers(0, 30), st.data())
def test_no_slot_is_lost_or_made(slots, data):
    num_forks = data.draw(st.integers(0, slots))
    budget = PathBudget(slots)
    children = budget.spend(num_forks)
    assert len(children) == num_forks
    assert budget.num_left + sum(child.num_left for child in children) + num_forks == slots


def test_budgets_of_the_roots():
    assert make_root_budgets(ForkBudgetMode.partitioned, (2, 1)) == [PathBudget(2), PathBudget(1)]
    first, second = make_root_budgets(ForkBudgetMode.first_come, (2, 1))
    assert first is second and first.num_left == 3
    assert make_root_budgets(ForkBudgetMode.first_come, ()) == []

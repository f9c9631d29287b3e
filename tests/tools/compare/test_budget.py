"""Fractions of a budget and the evaluations that are due, by hand."""

from dataclasses import replace

import pytest

from mega_agentrl.types.records import Role, RolloutTree, StopReason
from tests.fakes import OUTCOME, make_prompt, make_trajectory
from tools.compare.budget import Budget, RolloutCost

pytestmark = pytest.mark.extended

TOKENS = Budget(num_tokens=3000, num_steps=None, num_evaluations=4)
STEPS = Budget(num_tokens=1, num_steps=10, num_evaluations=10)


def test_an_evaluation_is_due_when_its_share_of_the_tokens_is_spent():
    due = {0: 0, 749: 0, 750: 1, 1499: 1, 2999: 3, 3000: 4, 9000: 4}
    assert {
        spent: TOKENS.num_evaluations_due(9, RolloutCost(num_tokens=spent)) for spent in due
    } == due
    assert TOKENS.fraction_spent(9, RolloutCost(num_tokens=1500)) == 0.5


def test_a_budget_of_steps_counts_no_tokens():
    spent = RolloutCost(num_tokens=10**9)
    assert [STEPS.num_evaluations_due(step, spent) for step in range(12)] == [*range(11), 10]
    # A tenth, summed up, is a little less than its multiples.
    assert STEPS.fraction_spent(3, spent) == 0.3


def trajectory(*sizes, invalid=(), **changes):
    """sizes: numbers of tokens of turns, in turn the policy's and a tool's. invalid: bad calls."""
    spans = [(Role.tool if turn % 2 else Role.assistant, size) for turn, size in enumerate(sizes)]
    outcomes = [replace(OUTCOME, is_invalid_call=turn in invalid) for turn in range(1, 99, 2)]
    return make_trajectory((0,), spans, outcomes=outcomes, **changes)


def test_shared_tokens_count_once_and_invalid_calls_not_at_all():
    root = trajectory(4, 3, 5, 2, 6)
    # Shares the first turn and its answer, then makes a call of its own and a bad one.
    fork = trajectory(4, 3, 2, 1, 2, 1, 2, fork_len=7, invalid=(5,), parent_id="root")
    failed = trajectory(8, 1, stop_reason=StopReason.tool_failure)
    trees = [
        RolloutTree(prompt=make_prompt(), trajectories=[root, fork]),
        RolloutTree(prompt=make_prompt(), trajectories=[failed]),
    ]
    # Root 4 + 5 + 6 tokens and 2 calls, fork 2 + 2 + 2 and 1, failed 8 and 1.
    assert RolloutCost.of_trees(trees) == RolloutCost(num_tokens=29, num_tool_calls=4)
    first, second = RolloutCost.of_trees(trees[:1]), RolloutCost.of_trees(trees[1:])
    assert first + second == RolloutCost.of_trees(trees)

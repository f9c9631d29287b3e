"""Fractions of a budget and the evaluations that are due, by hand."""

from mega_agentrl.train.resume.run_state import RolloutCost
from tools.compare.budget import Budget

TOKENS = Budget(num_tokens=3000, num_steps=None, num_evaluations=4)
STEPS = Budget(num_tokens=1, num_steps=10, num_evaluations=10)


def test_a_mark_is_due_when_its_share_is_spent():
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


def test_its_name():
    assert (str(TOKENS), str(STEPS)) == ("3,000 tokens", "10 steps")

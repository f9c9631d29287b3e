"""Fractions of a budget and the evaluations that are due, by hand."""

from mega_agentrl.types.records import (
    Role,
    RolloutTree,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)
from tests.fakes import make_prompt
from tools.compare.budget import Budget, RolloutCost

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


def trajectory(spans, *, fork_len=0, stop=StopReason.eos, bad=(), parent=None):
    """spans: lengths of what the policy and the tools wrote, in turns. bad: calls not run."""
    turns, mask, at = [], [], 0
    for index, length in enumerate(spans):
        told = index % 2
        outcome = ToolOutcome(
            tool="python",
            status=ToolStatus.ok,
            answer="",
            latency_s=0.0,
            is_invalid_call=index in bad,
        )
        turns.append(
            Turn(
                index=index,
                role=Role.tool if told else Role.assistant,
                start=at,
                stop=at + length,
                text="",
                outcome=outcome if told else None,
            )
        )
        mask += [1 - told] * length
        at += length
    return Trajectory(
        trajectory_id=f"{spans}",
        prompt=make_prompt(),
        path=(0,),
        token_ids=[1] * at,
        loss_mask=mask,
        logps=[0.0] * at,
        entropies=[0.0] * at,
        versions=[1] * at,
        turn_ids=[0] * at,
        turns=turns,
        stop_reason=stop,
        fork_len=fork_len,
        parent_id=parent,
    )


def test_what_is_shared_counts_once_and_what_was_not_run_not_at_all():
    root = trajectory([4, 3, 5, 2, 6])
    # Shares the first turn and its answer, then makes a call of its own and a bad one.
    fork = trajectory([4, 3, 2, 1, 2, 1, 2], fork_len=7, bad=(5,), parent="root")
    failed = trajectory([8, 1], stop=StopReason.tool_failure)
    trees = [
        RolloutTree(prompt=make_prompt(), trajectories=[root, fork]),
        RolloutTree(prompt=make_prompt(), trajectories=[failed]),
    ]
    # Root 4 + 5 + 6 tokens and 2 calls, fork 2 + 2 + 2 and 1, failed 8 and 1.
    assert RolloutCost.of_trees(trees) == RolloutCost(num_tokens=29, num_tool_calls=4)
    assert RolloutCost.of_trees(trees[:1]) + RolloutCost.of_trees(
        trees[1:]
    ) == RolloutCost.of_trees(trees)
    assert RolloutCost.of_trees([]) == RolloutCost()

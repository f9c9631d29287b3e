"""Numbers about finished rollout trees, named ``rollout/what``, and their rewards.

Means over trajectories leave out the failed ones, whose share is a number of its own. A
shared prefix counts for every trajectory that holds it, except in the entropies, which count
each sampled token once. Lengths are in tokens. Entropies are `entropy_metrics`' business,
forks and what they save `branch_metrics`', single tools `tool_metrics`', and the parts of the
reward, which are named ``reward/what``, `reward_metrics`'.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branch_metrics import branch_metrics
from mega_agentrl.rollout.entropy_metrics import entropy_metrics
from mega_agentrl.rollout.greedy import greedy_metrics
from mega_agentrl.rollout.reward_metrics import reward_metrics
from mega_agentrl.rollout.tool_metrics import tool_metrics
from mega_agentrl.types.records import Author, StopReason, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.records import RolloutTree, ToolOutcome, Trajectory

ENTROPY_WINDOW_TOKENS = 20
BUDGETS = (
    StopReason.length,
    StopReason.turn_limit,
    StopReason.call_limit,
    StopReason.wall_time,
    StopReason.interaction_limit,
)
"""Stop reasons that say that a budget was used up."""


def rollout_metrics(
    trees: Sequence[RolloutTree], *, window: int = ENTROPY_WINDOW_TOKENS
) -> dict[str, float]:
    """All metrics of a batch of trees.

    window: tokens at the start of a turn over which `entropy_root` (first turns) and
    `entropy_after_tool` (turns behind a tool's answer) are read.
    """
    everyone = [trajectory for tree in trees for trajectory in tree.trajectories]
    kept = [trajectory for trajectory in everyone if not trajectory.failed]
    scores = [trajectory.score for trajectory in kept if trajectory.score is not None]
    values = {
        "reward_mean": _mean(score.value for score in scores),
        "success": _mean(float(score.correct) for score in scores),
        "response_tokens": _mean(len(trajectory.token_ids) for trajectory in kept),
        "sampled_tokens": _mean(sum(trajectory.loss_mask) for trajectory in kept),
        "turns": _mean(_num_said(trajectory) for trajectory in kept),
        "failed": _mean(float(trajectory.failed) for trajectory in everyone),
        "num_trajectories": float(len(everyone)),
        "limits": _mean(float(one.stop_reason in BUDGETS) for one in everyone),
        "bad_calls": _mean(one.num_bad_calls for one in kept),
        "template_drift": _mean(float(one.template_drift != "") for one in kept),
        **branch_metrics(trees),
        **_stop_shares(everyone),
        **_tool_use(kept),
        **tool_metrics(everyone),
        **entropy_metrics(everyone, window=window),
        **greedy_metrics(trees),
    }
    named = {f"rollout/{name}": value for name, value in values.items()}
    return named | reward_metrics(everyone)


def _stop_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = Counter(trajectory.stop_reason for trajectory in trajectories)
    return {
        f"stop/{reason.value}": count[reason] / max(1, len(trajectories)) for reason in StopReason
    }


def _tool_use(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    outcomes = [outcome for trajectory in trajectories for outcome in _outcomes(trajectory)]
    count = Counter(outcome.tool for outcome in outcomes)
    return {
        "tool_use": _mean(float(trajectory.num_calls > 0) for trajectory in trajectories),
        "calls_mean": _mean(trajectory.num_calls for trajectory in trajectories),
        **{
            f"calls/{tool}": number / max(1, len(trajectories))
            for tool, number in sorted(count.items())
        },
        "calls_ok": _mean(float(outcome.status is ToolStatus.ok) for outcome in outcomes),
        "call_latency_s": _mean(outcome.latency_s for outcome in outcomes),
    }


def _outcomes(trajectory: Trajectory) -> list[ToolOutcome]:
    return [turn.outcome for turn in trajectory.turns if turn.outcome is not None]


def _num_said(trajectory: Trajectory) -> int:
    return sum(turn.author is Author.assistant for turn in trajectory.turns)


def _mean(values: Iterable[float]) -> float:
    """Mean, 0 of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0

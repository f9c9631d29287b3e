"""Metrics of finished rollout trees, named ``rollout/...``, and of their rewards (``reward/...``).

Means over trajectories leave out failed ones; `failed_fraction` is their share. A shared prefix
counts for every trajectory that contains it, except in entropies, which count each sampled token
once. Lengths are in tokens. The other modules of this package add entropies, branching, tools and
parts of the reward.

To add a metric: compute it here or in the module it belongs to, and assign it to a chart in
`report.page.chart_groups`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.rollout.groups.greedy import greedy_metrics
from mega_agentrl.rollout.metrics.branch import branch_metrics
from mega_agentrl.rollout.metrics.entropy import entropy_metrics
from mega_agentrl.rollout.metrics.reward import reward_metrics
from mega_agentrl.rollout.metrics.tools import tool_metrics
from mega_agentrl.types.records import Role, StopReason, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.records import RolloutTree, ToolOutcome, Trajectory

ENTROPY_WINDOW_TOKENS = 20
"""Default number of tokens at the start of a turn that its entropy metrics cover."""

LIMIT_STOP_REASONS = (
    StopReason.length,
    StopReason.turn_limit,
    StopReason.call_limit,
    StopReason.trajectory_timeout,
    StopReason.interaction_limit,
)
"""Stop reasons of trajectories that used up a budget."""


def rollout_metrics(
    trees: Sequence[RolloutTree], *, window: int = ENTROPY_WINDOW_TOKENS
) -> dict[str, float]:
    """Return all metrics of a batch of trees.

    Args:
        trees: The trees.
        window: Number of tokens at the start of a turn that `entropy_root` (first turns) and
            `entropy_after_tool` (turns behind a tool answer) cover.
    """
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    valid = [trajectory for trajectory in trajectories if not trajectory.failed]
    scores = [trajectory.score for trajectory in valid if trajectory.score is not None]
    values = {
        "reward_mean": _mean(score.value for score in scores),
        "success": _mean(float(score.correct) for score in scores),
        "response_tokens_mean": _mean(len(trajectory.token_ids) for trajectory in valid),
        "sampled_tokens_mean": _mean(sum(trajectory.loss_mask) for trajectory in valid),
        "num_turns_mean": _mean(_num_assistant_turns(trajectory) for trajectory in valid),
        "failed_fraction": _mean(float(trajectory.failed) for trajectory in trajectories),
        "num_trajectories": float(len(trajectories)),
        "truncated_fraction": _mean(
            float(one.stop_reason in LIMIT_STOP_REASONS) for one in trajectories
        ),
        "invalid_calls_mean": _mean(one.num_invalid_calls for one in valid),
        "template_drift_fraction": _mean(float(one.template_drift != "") for one in valid),
        **branch_metrics(trees),
        **_stop_reason_shares(trajectories),
        **_tool_call_metrics(valid),
        **tool_metrics(trajectories),
        **entropy_metrics(trajectories, window=window),
        **greedy_metrics(trees),
    }
    named = {f"rollout/{name}": value for name, value in values.items()}
    return named | reward_metrics(trajectories)


def _stop_reason_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = Counter(trajectory.stop_reason for trajectory in trajectories)
    return {
        f"stop/{reason.value}": count[reason] / max(1, len(trajectories)) for reason in StopReason
    }


def _tool_call_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    outcomes = [outcome for trajectory in trajectories for outcome in _tool_outcomes(trajectory)]
    count = Counter(outcome.tool for outcome in outcomes)
    return {
        "tool_use_fraction": _mean(
            float(trajectory.num_tool_calls > 0) for trajectory in trajectories
        ),
        "tool_calls_mean": _mean(trajectory.num_tool_calls for trajectory in trajectories),
        **{
            f"calls/{tool}": number / max(1, len(trajectories))
            for tool, number in sorted(count.items())
        },
        "tool_success_rate": _mean(float(outcome.status is ToolStatus.ok) for outcome in outcomes),
        "tool_latency_mean_s": _mean(outcome.latency_s for outcome in outcomes),
    }


def _tool_outcomes(trajectory: Trajectory) -> list[ToolOutcome]:
    return [turn.outcome for turn in trajectory.turns if turn.outcome is not None]


def _num_assistant_turns(trajectory: Trajectory) -> int:
    return sum(turn.role is Role.assistant for turn in trajectory.turns)


def _mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 without values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0

"""Metrics of each tool in a batch of trajectories, named ``tool/<name>/...``.

    num_calls, num_<status>   calls, total and by status; failures outside of calls count as
                              infra_error
    latency_mean_s, latency_p50_s, latency_p99_s, latency_max_s, queue_mean_s
    step_reward, final_reward mean per valid trajectory (step rewards are summed)
    metric/<key>              mean of the tool's own metrics

A call in a shared prefix counts once; rewards count for every trajectory on whose path they lie.
Quantiles are observed values (nearest rank).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.records import ToolOutcome, Trajectory

_TOOL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of all tools; empty without calls and rewards."""
    outcomes: defaultdict[str, list[ToolOutcome]] = defaultdict(list)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.outcome is not None and turn.start >= trajectory.fork_len:
                outcomes[_sanitize_tool_name(turn.outcome.tool)].append(turn.outcome)
    values: dict[str, float] = {}
    for name, calls in sorted(outcomes.items()):
        values |= {f"tool/{name}/{key}": value for key, value in _call_metrics(calls).items()}
    return values | _tool_reward_metrics([one for one in trajectories if not one.failed])


def _call_metrics(outcomes: Sequence[ToolOutcome]) -> dict[str, float]:
    latency_s = sorted(outcome.latency_s for outcome in outcomes)
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for key, value in outcome.metrics.items():
            measured[key].append(value)
    return {
        "num_calls": float(len(outcomes)),
        **{
            f"num_{status.value}": float(sum(outcome.status is status for outcome in outcomes))
            for status in ToolStatus
        },
        "latency_mean_s": _mean(latency_s),
        "latency_p50_s": _nearest_rank_quantile(latency_s, 0.5),
        "latency_p99_s": _nearest_rank_quantile(latency_s, 0.99),
        "latency_max_s": latency_s[-1],
        "queue_mean_s": _mean([outcome.queue_s for outcome in outcomes]),
        **{f"metric/{key}": _mean(values) for key, values in sorted(measured.items())},
    }


def _tool_reward_metrics(valid: Sequence[Trajectory]) -> dict[str, float]:
    steps: defaultdict[str, float] = defaultdict(float)
    final: defaultdict[str, float] = defaultdict(float)
    for trajectory in valid:
        for name, rewards in trajectory.step_rewards.items():
            steps[_sanitize_tool_name(name)] += sum(rewards)
        for name, reward in trajectory.tool_rewards.items():
            final[_sanitize_tool_name(name)] += reward
    values = {f"tool/{name}/step_reward": total / len(valid) for name, total in steps.items()}
    values |= {f"tool/{name}/final_reward": total / len(valid) for name, total in final.items()}
    return dict(sorted(values.items()))


def _sanitize_tool_name(name: str) -> str:
    """Replace malformed names, which the policy made up."""
    return name if _TOOL_NAME_PATTERN.fullmatch(name) else "unknown"


def _nearest_rank_quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

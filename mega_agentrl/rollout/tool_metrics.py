"""Numbers about each tool in a batch of trajectories, named ``tool/<name>/what``.

    num_calls, num_<status>   calls, by how they went; faults outside of calls count as infra_error
    latency_mean_s, latency_p50_s, latency_p99_s, latency_max_s, queue_mean_s
    step_reward, final_reward mean per trajectory that did not fail (steps summed)
    metric/<key>              mean of what the tool itself measured

A call in a shared prefix counts once; the rewards of a trajectory are those of its whole path.
p50 and p99 are values that occurred (nearest rank).
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

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """All metrics of the trajectories' tools; empty without a call and a reward."""
    outcomes: defaultdict[str, list[ToolOutcome]] = defaultdict(list)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.outcome is not None and turn.start >= trajectory.fork_len:
                outcomes[_shown(turn.outcome.tool)].append(turn.outcome)
    values: dict[str, float] = {}
    for name, calls in sorted(outcomes.items()):
        values |= {f"tool/{name}/{key}": value for key, value in _calls(calls).items()}
    return values | _rewards([one for one in trajectories if not one.failed])


def _calls(outcomes: Sequence[ToolOutcome]) -> dict[str, float]:
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
        "latency_p50_s": _rank(latency_s, 0.5),
        "latency_p99_s": _rank(latency_s, 0.99),
        "latency_max_s": latency_s[-1],
        "queue_mean_s": _mean([outcome.queue_s for outcome in outcomes]),
        **{f"metric/{key}": _mean(values) for key, values in sorted(measured.items())},
    }


def _rewards(kept: Sequence[Trajectory]) -> dict[str, float]:
    steps: defaultdict[str, float] = defaultdict(float)
    final: defaultdict[str, float] = defaultdict(float)
    for trajectory in kept:
        for name, rewards in trajectory.step_rewards.items():
            steps[_shown(name)] += sum(rewards)
        for name, reward in trajectory.tool_rewards.items():
            final[_shown(name)] += reward
    values = {f"tool/{name}/step_reward": total / len(kept) for name, total in steps.items()}
    values |= {f"tool/{name}/final_reward": total / len(kept) for name, total in final.items()}
    return dict(sorted(values.items()))


def _shown(name: str) -> str:
    """A name the policy made up is not let into the names of metrics."""
    return name if _NAME.fullmatch(name) else "unknown"


def _rank(ordered: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` of all do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

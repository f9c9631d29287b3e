"""Metrics of finished rollout trees, named ``rollout/...``, and of their rewards (``reward/...``).

Means over trajectories leave out failed ones; `failed_fraction` is their share. A shared prefix
counts for every trajectory that contains it, except in entropies (see `metrics.entropy`) and tool
calls by tool, which count each token or call once. Lengths are in tokens. Names that others choose
are bounded (`metrics.names`).

To add a metric:

1. Compute it in the function below whose trajectories it is about.
2. Describe it in the docstring of this function.
3. Assign it to a chart in `report.page.chart_groups`.
4. Test it by hand in `tests/rollout/metrics/test_rollout_metrics.py`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from mega_agentrl.rollout.groups.scoring import valid_scores
from mega_agentrl.rollout.metrics.entropy import entropy_metrics
from mega_agentrl.rollout.metrics.names import FIELD_PATTERN, MetricNames, NamesOfRun
from mega_agentrl.types.records import Role, StopReason, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mega_agentrl.types.records import RolloutTree, Score, ToolOutcome, Trajectory

LIMIT_STOP_REASONS = (
    StopReason.length,
    StopReason.turn_limit,
    StopReason.call_limit,
    StopReason.time_limit,
    StopReason.trajectory_timeout,
    StopReason.interaction_limit,
)
"""Stop reasons of trajectories that used up a budget."""


def rollout_metrics(
    trees: Sequence[RolloutTree], names: NamesOfRun | None = None
) -> dict[str, float]:
    """Return all metrics of a batch of trees.

    Args:
        trees: The trees.
        names: Names in the metrics of earlier batches of the run; None for a batch alone.
    """
    names = names or NamesOfRun()
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    valid = [trajectory for trajectory in trajectories if not trajectory.failed]
    scores = valid_scores(trajectories)
    values = {
        "reward_mean": mean_or_zero(score.value for score in scores),
        "success": mean_or_zero(float(score.correct) for score in scores),
        "reward_min": min((score.value for score in scores), default=0.0),
        "reward_max": max((score.value for score in scores), default=0.0),
        **_length_metrics(trees, valid),
        "sampled_tokens_mean": mean_or_zero(sum(trajectory.loss_mask) for trajectory in valid),
        "num_turns_mean": mean_or_zero(_num_assistant_turns(trajectory) for trajectory in valid),
        "failed_fraction": mean_or_zero(
            float(trajectory.failed and not trajectory.reward_abstained)
            for trajectory in trajectories
        ),
        "num_trajectories": float(len(trajectories)),
        "truncated_fraction": mean_or_zero(
            float(trajectory.stop_reason in LIMIT_STOP_REASONS) for trajectory in trajectories
        ),
        "invalid_calls_mean": mean_or_zero(trajectory.num_invalid_calls for trajectory in valid),
        "template_drift_fraction": mean_or_zero(
            float(trajectory.template_drift != "") for trajectory in valid
        ),
        **branch_metrics(trees),
        **_stop_reason_shares(trajectories),
        **_request_metrics(trajectories, names),
        **_tool_call_metrics(valid, _names_of_tools(trajectories, names)),
        **tool_metrics(trajectories, names),
        **entropy_metrics(trajectories),
        **greedy_metrics(trees),
    }
    named = {f"rollout/{name}": value for name, value in values.items()}
    return named | reward_metrics(trajectories, names)


def _length_metrics(trees: Sequence[RolloutTree], valid: Sequence[Trajectory]) -> dict[str, float]:
    """Return lengths in tokens of the valid responses and of the prompts of all trees."""
    response_lengths = [len(trajectory.token_ids) for trajectory in valid]
    prompt_lengths = [len(tree.prompt.token_ids) for tree in trees]
    return {
        "response_tokens_mean": mean_or_zero(response_lengths),
        "response_tokens_min": float(min(response_lengths, default=0)),
        "response_tokens_max": float(max(response_lengths, default=0)),
        "prompt_tokens_mean": mean_or_zero(prompt_lengths),
        "prompt_tokens_max": float(max(prompt_lengths, default=0)),
    }


def _stop_reason_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = Counter(trajectory.stop_reason for trajectory in trajectories)
    return {
        f"stop/{reason.value}": count[reason] / max(1, len(trajectories)) for reason in StopReason
    }


def _request_metrics(
    trajectories: Sequence[Trajectory], names_of_run: NamesOfRun
) -> dict[str, float]:
    """Return metrics of the requests of agents, named ``agent/...``; empty for the native loop.

    requests_mean, branches_mean  mean per attempt; a branch is a history that was rewritten, or the
                                  context of a sub-agent
    ignored/<field>               share of the requests with a field that has no effect
    """
    attempts = [item.request_counts for item in trajectories if item.request_counts]
    totals: Counter[str] = Counter()
    for counts in attempts:
        totals.update(counts)
    num_requests = totals["requests"]
    by_field = {
        name.removeprefix("ignored/"): count
        for name, count in totals.items()
        if name.startswith("ignored/")
    }
    names = MetricNames(
        Counter(by_field).elements(), names_of_run.of_kind("ignored"), pattern=FIELD_PATTERN
    )
    num_ignored: Counter[str] = Counter()
    for name, count in by_field.items():
        num_ignored[f"agent/ignored/{names[name]}"] += count
    ignored = {name: count / num_requests for name, count in sorted(num_ignored.items())}
    if not attempts:
        return {}
    means = {
        f"agent/{name}_mean": totals[name] / len(attempts) for name in ("requests", "branches")
    }
    return means | ignored


def _names_of_tools(trajectories: Sequence[Trajectory], names_of_run: NamesOfRun) -> MetricNames:
    """Return the names of tools; made up are those of no prompt of which no call ran."""
    outcomes = [outcome for trajectory in trajectories for outcome in _tool_outcomes(trajectory)]
    rewarded = [
        name
        for trajectory in trajectories
        for name in (*trajectory.step_rewards, *trajectory.tool_rewards)
    ]
    schemas = (schema for trajectory in trajectories for schema in trajectory.prompt.tool_schemas)
    known = {str(schema.get("function", {}).get("name")) for schema in schemas}
    known.update(outcome.tool for outcome in outcomes if not outcome.is_invalid_call)
    called = [outcome.tool for outcome in outcomes]
    earlier = names_of_run.of_kind("tool")
    return MetricNames([*called, *rewarded], earlier, made_up=set(called) - known)


def _tool_call_metrics(trajectories: Sequence[Trajectory], names: MetricNames) -> dict[str, float]:
    outcomes = [outcome for trajectory in trajectories for outcome in _tool_outcomes(trajectory)]
    count = Counter(names[outcome.tool] for outcome in outcomes)
    return {
        "tool_use_fraction": mean_or_zero(
            float(trajectory.num_tool_calls > 0) for trajectory in trajectories
        ),
        "tool_calls_mean": mean_or_zero(trajectory.num_tool_calls for trajectory in trajectories),
        **{
            f"calls/{tool}": number / max(1, len(trajectories))
            for tool, number in sorted(count.items())
        },
        "tool_success_rate": mean_or_zero(
            float(outcome.status is ToolStatus.ok) for outcome in outcomes
        ),
        "tool_latency_mean_s": mean_or_zero(outcome.latency_s for outcome in outcomes),
    }


def _tool_outcomes(trajectory: Trajectory) -> list[ToolOutcome]:
    return [turn.outcome for turn in trajectory.turns if turn.outcome is not None]


def _num_assistant_turns(trajectory: Trajectory) -> int:
    return sum(turn.role is Role.assistant for turn in trajectory.turns)


def branch_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Return metrics of branching, over all trajectories including failed ones.

    forks_per_prompt, extra_roots_per_prompt, decisions_per_prompt
                                mean per tree; a decision is one question to the branch policy
    abandoned_forks_per_prompt  mean per tree of forks that an agent could not repeat; only if there
                                are any
    fork_rate                   share of decisions that forked
    delta_h                     mean of the probe's entropy minus the baseline over all decisions,
                                nats (with `released` in its own unit); left out without decisions
    tokens_saved_fraction       sampled tokens inherited from a parent, as a share of the sampled
                                tokens on all M paths, which M independent rollouts would sample
    calls_saved_fraction        the same for tool calls
    topk_entropy_gap            mean absolute error of the top-k entropy estimate, nats; only if
                                `rollout.branch.entropy_estimate_top_k` is set
    """
    paths = [trajectory for tree in trees for trajectory in tree.trajectories]
    decisions = [decision for path in paths for decision in path.decisions]
    rises = [decision.delta_h for decision in decisions if decision.delta_h is not None]
    values = {
        "forks_per_prompt": _share(sum(tree.num_forks for tree in trees), len(trees)),
        "extra_roots_per_prompt": _share(sum(tree.num_extra_roots for tree in trees), len(trees)),
        "decisions_per_prompt": _share(len(decisions), len(trees)),
        "fork_rate": _share(sum(decision.num_forks > 0 for decision in decisions), len(decisions)),
        "tokens_saved_fraction": _saved_share(
            (sum(path.loss_mask[: path.fork_len]), sum(path.loss_mask)) for path in paths
        ),
        "calls_saved_fraction": _saved_share(
            _num_inherited_and_total_calls(path) for path in paths
        ),
    }
    if num_abandoned := sum(tree.num_abandoned_forks for tree in trees):
        values["abandoned_forks_per_prompt"] = num_abandoned / len(trees)
    if rises:
        values["delta_h"] = sum(rises) / len(rises)
    gaps = [path.topk_entropy_error for path in paths if path.topk_entropy_error is not None]
    if gaps:
        values["topk_entropy_gap"] = sum(gaps) / len(gaps)
    return values


def _num_inherited_and_total_calls(trajectory: Trajectory) -> tuple[int, int]:
    """Return the number of calls inherited from the parent, and of all calls on the path."""
    starts = [turn.start for turn in trajectory.turns if turn.outcome is not None]
    return sum(start < trajectory.fork_len for start in starts), len(starts)


def _saved_share(inherited_and_total: Iterable[tuple[int, int]]) -> float:
    pairs = list(inherited_and_total)
    return _share(sum(inherited for inherited, _ in pairs), sum(total for _, total in pairs))


def _share(part: int, whole: int) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def tool_metrics(
    trajectories: Sequence[Trajectory], names_of_run: NamesOfRun | None = None
) -> dict[str, float]:
    """Return metrics of each tool, named ``tool/<name>/...``; empty without calls and rewards.

    num_calls, num_<status>   calls, total and by status; failures outside of calls count as
                              infra_error
    latency_mean_s, latency_p50_s, latency_p99_s, latency_max_s, queue_mean_s
    step_reward, final_reward mean per valid trajectory (step rewards are summed)
    metric/<key>              mean of the tool's own metrics

    A call in a shared prefix counts once; rewards count for every trajectory on whose path they
    lie. Quantiles are observed values (nearest rank).
    """
    names_of_run = names_of_run or NamesOfRun()
    names = _names_of_tools(trajectories, names_of_run)
    outcomes: defaultdict[str, list[ToolOutcome]] = defaultdict(list)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.outcome is not None and turn.start >= trajectory.fork_len:
                outcomes[names[turn.outcome.tool]].append(turn.outcome)
    values: dict[str, float] = {}
    for name, calls in sorted(outcomes.items()):
        measured = _call_metrics(calls, names_of_run.of_kind(f"metric of {name}"))
        values |= {f"tool/{name}/{key}": value for key, value in measured.items()}
    valid = [trajectory for trajectory in trajectories if not trajectory.failed]
    return values | _tool_reward_metrics(valid, names)


def _call_metrics(outcomes: Sequence[ToolOutcome], earlier: set[str]) -> dict[str, float]:
    latency_s = sorted(outcome.latency_s for outcome in outcomes)
    keys = (key for item in outcomes for key in item.metrics)
    names = MetricNames(keys, earlier, pattern=FIELD_PATTERN)
    measured: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        for key, value in outcome.metrics.items():
            measured[names[key]].append(value)
    return {
        "num_calls": float(len(outcomes)),
        **{
            f"num_{status.value}": float(sum(outcome.status is status for outcome in outcomes))
            for status in ToolStatus
        },
        "latency_mean_s": mean_or_zero(latency_s),
        "latency_p50_s": _nearest_rank_quantile(latency_s, 0.5),
        "latency_p99_s": _nearest_rank_quantile(latency_s, 0.99),
        "latency_max_s": latency_s[-1],
        "queue_mean_s": mean_or_zero(outcome.queue_s for outcome in outcomes),
        **{f"metric/{key}": mean_or_zero(values) for key, values in sorted(measured.items())},
    }


def _tool_reward_metrics(valid: Sequence[Trajectory], names: MetricNames) -> dict[str, float]:
    steps: defaultdict[str, float] = defaultdict(float)
    final: defaultdict[str, float] = defaultdict(float)
    for trajectory in valid:
        for name, rewards in trajectory.step_rewards.items():
            steps[names[name]] += sum(rewards)
        for name, reward in trajectory.tool_rewards.items():
            final[names[name]] += reward
    values = {f"tool/{name}/step_reward": total / len(valid) for name, total in steps.items()}
    values |= {f"tool/{name}/final_reward": total / len(valid) for name, total in final.items()}
    return dict(sorted(values.items()))


def _nearest_rank_quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def greedy_metrics(trees: Iterable[RolloutTree]) -> dict[str, float]:
    """Return metrics of the greedy trajectories; empty if there are none.

    `greedy_reward` and `greedy_success` are means over the scored ones, `greedy_failed` is the
    share of the others. `greedy_tokens` and `greedy_calls` are the total sampled tokens and tool
    calls, which the metrics of the groups do not include.
    """
    trajectories = [tree.greedy_trajectory for tree in trees if tree.greedy_trajectory is not None]
    if not trajectories:
        return {}
    scores = valid_scores(trajectories)
    return {
        "greedy_reward": mean_or_zero(score.value for score in scores),
        "greedy_success": mean_or_zero(score.correct for score in scores),
        "greedy_failed": 1 - len(scores) / len(trajectories),
        "greedy_tokens": float(sum(sum(trajectory.loss_mask) for trajectory in trajectories)),
        "greedy_calls": float(sum(trajectory.num_tool_calls for trajectory in trajectories)),
    }


def reward_metrics(
    trajectories: Sequence[Trajectory], names_of_run: NamesOfRun | None = None
) -> dict[str, float]:
    """Return metrics of the parts of the reward, as means over valid trajectories.

    reward/<part>           weighted contribution of a part; only for rewards with several parts
    reward/<part>/<field>   finite number (or bool) that a user's reward function returned in
                            addition
    reward/failed_fraction  share of all trajectories whose reward could not be computed
    reward/abstained_fraction  share of those that the functions gave no score on purpose, if any
    """
    names_of_run = names_of_run or NamesOfRun()
    scores = valid_scores(trajectories)
    names = {
        part: MetricNames(
            (name for score in scores for name in score.extra_info.get(part, ())),
            names_of_run.of_kind(f"field of {part}"),
            pattern=FIELD_PATTERN,
        )
        for part in {part for score in scores for part in score.extra_info}
    }
    values: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in _score_values(score, names):
            values[name].append(value)
    missing = [float(trajectory.reward_error != "") for trajectory in trajectories]
    abstained = mean_or_zero(trajectory.reward_abstained for trajectory in trajectories)
    means = {f"reward/{name}": mean_or_zero(values[name]) for name in sorted(values)}
    if abstained:
        means["reward/abstained_fraction"] = abstained
    return {"reward/failed_fraction": mean_or_zero(missing), **means}


def _score_values(score: Score, names: Mapping[str, MetricNames]) -> Iterator[tuple[str, float]]:
    yield from score.parts.items()
    for part, fields in score.extra_info.items():
        for name, value in fields.items():
            if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                yield f"{part}/{names[part][name]}", float(value)


def mean_or_zero(values: Iterable[float]) -> float:
    """Return the mean, or 0 without values; the mean of finite values is finite."""
    numbers = list(values)
    total = sum(numbers)
    if not math.isfinite(total):  # the sum may overflow where the mean does not
        return sum(number / len(numbers) for number in numbers)
    return total / len(numbers) if numbers else 0.0

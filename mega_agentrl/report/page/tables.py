"""Tables of the report page: held-out evaluations, and tool calls over a whole run.

The table of evaluations compares the first and the last one. Known metrics come first, with labels,
then all other metrics. Changes are coloured if higher is known to be better.

The table of tools has counts by outcome, latencies and rewards, aggregated from the metrics
``rollout/tool/<name>/...`` of every step. Counts are summed, mean latencies are weighted by calls,
p50 is the median over steps, p99 and max are the largest values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from mega_agentrl.report.page.chart_groups import RL_STAGE, tool_names
from mega_agentrl.report.page.html import render_template
from mega_agentrl.report.validation_console import EvalComparisonRow, ScoredCount
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from mega_agentrl.report.metrics_file import MetricLine, MetricLog

TOOL_STATUSES = tuple(status.value for status in ToolStatus)
TOOL_METRIC_PREFIX = "rollout/tool/"
_LABELLED_METRICS = (
    ("sampled/reward", "reward"),
    ("sampled/success", "success"),
    ("greedy/reward", "reward, greedy"),
    ("greedy/success", "success, greedy"),
    ("sampled/rollout/tool_use_fraction", "answers with a tool"),
    ("sampled/rollout/tool_calls_mean", "calls per answer"),
    ("sampled/rollout/response_tokens_mean", "response tokens"),
    ("sampled/rollout/entropy", "entropy, nats"),
)
_BY_SOURCE_PREFIXES = ("sampled/success/", "sampled/reward/", "greedy/success/", "greedy/reward/")
_STANDARD_ERROR_SUFFIX = "_se"
_HIGHER_IS_BETTER = ("reward", "success", "pass", "mean@")


def validation_rows(
    before: Mapping[str, float], after: Mapping[str, float]
) -> list[EvalComparisonRow]:
    """Return rows of the metrics of either evaluation, except for unlabelled rollout metrics."""
    names = list(dict.fromkeys([*before, *after, *_success_metrics_by_source(before, after)]))
    chosen = [(name, label) for name, label in _LABELLED_METRICS if name in names]
    for head in _BY_SOURCE_PREFIXES:
        kind, measure, _ = head.split("/")
        suffix = ", greedy" if kind == "greedy" else ""
        chosen += [
            (name, f"{measure} on {name.removeprefix(head)}{suffix}")
            for name in names
            if name.startswith(head)
        ]
    known = {name for name, _ in chosen}
    for name in names:
        is_other = name not in known and "/rollout/" not in name and not name.startswith("time/")
        if is_other and not name.endswith(_STANDARD_ERROR_SUFFIX) and not _is_count(name):
            chosen.append((name, name.removeprefix("sampled/")))
    return [
        EvalComparisonRow(
            label=label,
            before=before.get(name),
            after=after.get(name),
            before_se=before.get(name + _STANDARD_ERROR_SUFFIX),
            after_se=after.get(name + _STANDARD_ERROR_SUFFIX),
            before_scored=_scored_count(before, name),
            after_scored=_scored_count(after, name),
        )
        for name, label in chosen
    ]


def _is_count(name: str) -> bool:
    return name.split("/")[1:2] in (["num_scored"], ["num_answers"])


def _success_metrics_by_source(*evaluations: Mapping[str, float]) -> list[str]:
    """Return the success metric of each data source; one without a scored answer lacks it."""
    head = "sampled/num_answers/"
    sources = [name.removeprefix(head) for names in evaluations for name in names if head in name]
    return [f"sampled/success/{source}" for source in sources]


def _scored_count(values: Mapping[str, float], name: str) -> ScoredCount | None:
    """Return the number of answers that a mean covers; None unless it is reward or success."""
    kind, _, rest = name.partition("/")
    measure, slash, source = rest.partition("/")
    num_answers = values.get(f"{kind}/num_answers{slash}{source}")
    if measure not in ("reward", "success") or num_answers is None:
        return None
    num_scored = values.get(f"{kind}/num_scored{slash}{source}", 0.0)
    return ScoredCount(num_scored=round(num_scored), num_answers=round(num_answers))


def validation_table(lines: Sequence[MetricLine]) -> Markup:
    """Render the first and the last evaluation, or a single one."""
    first, last = lines[0], lines[-1]
    has_change = len(lines) > 1
    rows = validation_rows(first.values, last.values if has_change else {})
    after = [f"after step {last.step}", "change"] if has_change else []
    return render_template(
        "validation_table.html",
        heads=["", f"after step {first.step}", *after],
        rows=[(row, _change_class(row)) for row in rows],
        has_change=has_change,
    )


def _change_class(row: EvalComparisonRow) -> str | None:
    """Return the CSS class of a change that is known to be better or worse."""
    if not row.change or not row.label.startswith(_HIGHER_IS_BETTER):
        return None
    return "up" if row.change > 0 else "down"


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolRow:
    """Statistics of a tool; None where nothing was measured."""

    name: str
    num_calls: float
    num_by_status: Mapping[str, float]
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    queue_s: float | None
    reward: float | None


def tool_rows(log: MetricLog) -> list[ToolRow]:
    """Return the tools of the RL steps, or of the evaluations in a run without RL steps."""
    lines, prefix = log.lines_of_stage(RL_STAGE), TOOL_METRIC_PREFIX
    names = tool_names(log, RL_STAGE)
    if not names and (evals := log.validation_lines()):
        lines, prefix = evals, f"sampled/{TOOL_METRIC_PREFIX}"
        names = sorted({name for line in evals for name in tool_names(log, line.stage, prefix)})
    return [_build_tool_row(name, lines, f"{prefix}{name}/") for name in names]


def _build_tool_row(name: str, lines: Sequence[MetricLine], head: str) -> ToolRow:
    def finite_values(key: str) -> list[float]:
        samples = (line.values.get(f"{head}{key}", math.nan) for line in lines)
        return [value for value in samples if math.isfinite(value)]

    def weighted_mean(key: str) -> float | None:
        pairs = [
            (line.values[f"{head}{key}"], line.values.get(f"{head}num_calls", 0.0))
            for line in lines
            if math.isfinite(line.values.get(f"{head}{key}", math.nan))
        ]
        calls = sum(count for _, count in pairs)
        return sum(value * count for value, count in pairs) / calls if calls else None

    rewards = [*finite_values("step_reward"), *finite_values("final_reward")]
    return ToolRow(
        name=name,
        num_calls=sum(finite_values("num_calls")),
        num_by_status={status: sum(finite_values(f"num_{status}")) for status in TOOL_STATUSES},
        mean_s=weighted_mean("latency_mean_s"),
        p50_s=median(samples) if (samples := finite_values("latency_p50_s")) else None,
        p99_s=max(finite_values("latency_p99_s"), default=None),
        max_s=max(finite_values("latency_max_s"), default=None),
        queue_s=weighted_mean("queue_mean_s"),
        reward=sum(rewards) / len(lines) if rewards else None,
    )


def tool_table(rows: Sequence[ToolRow]) -> Markup:
    """Render the rows as an HTML table with a bar of outcomes."""
    times = ("mean s", "p50 s", "p99 s", "max s", "queue s")
    heads = ["tool", "calls", "outcomes", *TOOL_STATUSES, *times, "reward"]
    return render_template(
        "tool_table.html",
        heads=[name.replace("_", " ") for name in heads],
        rows=[(row, _outcome_bar(row)) for row in rows],
    )


def _outcome_bar(row: ToolRow) -> list[tuple[str, str, str]]:
    """Return status, start and width of the parts of a bar of 100 units."""
    parts, start = [], 0.0
    for status, count in row.num_by_status.items():
        width = 100 * count / row.num_calls if row.num_calls else 0.0
        if width > 0:
            parts.append((status, f"{start:.2f}", f"{width:.2f}"))
        start += width
    return parts

"""How the calls of each tool went over a whole run: counts by outcome, seconds, rewards.

From the metrics ``rollout/tool/<name>/...`` of every step (`rollout.tool_metrics`). Counts add
up; mean seconds are weighted by calls; the percentiles shown are the median over steps of p50
and the largest of p99 and max. Runs that logged only calls per trajectory give what they have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from mega_agentrl.report.chart_choice import RL, tool_names
from mega_agentrl.report.markup import Markup, tag
from mega_agentrl.report.scale import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.metric_log import MetricLine, MetricLog

STATUSES = ("ok", "user_error", "timeout", "infra_error")
PREFIX = "rollout/tool/"


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolRow:
    """One tool; None where nothing was measured."""

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
    """Tools of the RL steps, or, in a run without any, of its evaluations."""
    lines, prefix = log.of(RL), PREFIX
    names = tool_names(log, RL)
    if not names and (found := log.held_out()):
        lines, prefix = found, f"sampled/{PREFIX}"
        names = sorted({name for line in found for name in tool_names(log, line.stage, prefix)})
    return [_row(name, lines, f"{prefix}{name}/") for name in names]


def _row(name: str, lines: Sequence[MetricLine], head: str) -> ToolRow:
    def values(key: str) -> list[float]:
        found = (line.values.get(f"{head}{key}", math.nan) for line in lines)
        return [value for value in found if math.isfinite(value)]

    def weighted(key: str) -> float | None:
        pairs = [
            (line.values[f"{head}{key}"], line.values.get(f"{head}num_calls", 0.0))
            for line in lines
            if math.isfinite(line.values.get(f"{head}{key}", math.nan))
        ]
        calls = sum(count for _, count in pairs)
        return sum(value * count for value, count in pairs) / calls if calls else None

    rewards = [*values("step_reward"), *values("final_reward")]
    return ToolRow(
        name=name,
        num_calls=sum(values("num_calls")),
        num_by_status={status: sum(values(f"num_{status}")) for status in STATUSES},
        mean_s=weighted("latency_mean_s"),
        p50_s=median(found) if (found := values("latency_p50_s")) else None,
        p99_s=max(values("latency_p99_s"), default=None),
        max_s=max(values("latency_max_s"), default=None),
        queue_s=weighted("queue_mean_s"),
        reward=sum(rewards) / len(lines) if rewards else None,
    )


def tool_table(rows: Sequence[ToolRow]) -> Markup:
    """The rows as an HTML table with a bar of outcomes each."""
    times = ("mean s", "p50 s", "p99 s", "max s", "queue s")
    heads = ["tool", "calls", "outcomes", *STATUSES, *times, "reward"]
    body = [
        tag(
            "tr",
            tag("th", row.name, scope="row"),
            tag("td", f"{row.num_calls:,.0f}"),
            tag("td", _bar(row), class_="bar"),
            *(tag("td", _count(row.num_by_status[status], row.num_calls)) for status in STATUSES),
            *(
                tag("td", "-" if value is None else number(value))
                for value in (row.mean_s, row.p50_s, row.p99_s, row.max_s, row.queue_s, row.reward)
            ),
        )
        for row in rows
    ]
    head = tag("tr", *(tag("th", name.replace("_", " "), scope="col") for name in heads))
    return tag("table", tag("thead", head), tag("tbody", *body), class_="figures", id="tools")


def _count(count: float, total: float) -> Markup:
    share = f"{count / total:.1%}" if total else "-"
    return tag("span", f"{count:,.0f} ", tag("small", share))


def _bar(row: ToolRow) -> Markup:
    """Outcomes as one line of 100 units."""
    parts, at = [], 0.0
    for status in STATUSES:
        width = 100 * row.num_by_status[status] / row.num_calls if row.num_calls else 0.0
        if width > 0:
            parts.append(
                tag("rect", x=f"{at:.2f}", width=f"{width:.2f}", height=8, class_=f"o-{status}")
            )
        at += width
    return tag("svg", *parts, viewBox="0 0 100 8", preserveAspectRatio="none", class_="share")

"""Table of tool calls over a whole run: counts by outcome, latencies, rewards.

Aggregates the metrics ``rollout/tool/<name>/...`` of every step. Counts are summed, mean latencies
are weighted by calls, p50 is the median over steps, p99 and max are the largest values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from mega_agentrl.report.page.axes import format_number
from mega_agentrl.report.page.chart_groups import RL_STAGE, tool_names
from mega_agentrl.report.page.html import SafeHtml, html_element

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.metrics_file import MetricLine, MetricLog

STATUSES = ("ok", "user_error", "timeout", "infra_error")
TOOL_METRIC_PREFIX = "rollout/tool/"


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
    if not names and (found := log.validation_lines()):
        lines, prefix = found, f"sampled/{TOOL_METRIC_PREFIX}"
        names = sorted({name for line in found for name in tool_names(log, line.stage, prefix)})
    return [_build_tool_row(name, lines, f"{prefix}{name}/") for name in names]


def _build_tool_row(name: str, lines: Sequence[MetricLine], head: str) -> ToolRow:
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


def tool_table(rows: Sequence[ToolRow]) -> SafeHtml:
    """Render the rows as an HTML table with a bar of outcomes."""
    times = ("mean s", "p50 s", "p99 s", "max s", "queue s")
    heads = ["tool", "calls", "outcomes", *STATUSES, *times, "reward"]
    body = [
        html_element(
            "tr",
            html_element("th", row.name, scope="row"),
            html_element("td", f"{row.num_calls:,.0f}"),
            html_element("td", _outcome_bar(row), class_="bar"),
            *(
                html_element("td", _count_cell(row.num_by_status[status], row.num_calls))
                for status in STATUSES
            ),
            *(
                html_element("td", "-" if value is None else format_number(value))
                for value in (row.mean_s, row.p50_s, row.p99_s, row.max_s, row.queue_s, row.reward)
            ),
        )
        for row in rows
    ]
    head = html_element(
        "tr", *(html_element("th", name.replace("_", " "), scope="col") for name in heads)
    )
    return html_element(
        "table",
        html_element("thead", head),
        html_element("tbody", *body),
        class_="figures",
        id="tools",
    )


def _count_cell(count: float, total: float) -> SafeHtml:
    share = f"{count / total:.1%}" if total else "-"
    return html_element("span", f"{count:,.0f} ", html_element("small", share))


def _outcome_bar(row: ToolRow) -> SafeHtml:
    """Render the outcomes as a bar of 100 units."""
    parts, at = [], 0.0
    for status in STATUSES:
        width = 100 * row.num_by_status[status] / row.num_calls if row.num_calls else 0.0
        if width > 0:
            parts.append(
                html_element(
                    "rect", x=f"{at:.2f}", width=f"{width:.2f}", height=8, class_=f"o-{status}"
                )
            )
        at += width
    return html_element(
        "svg", *parts, viewBox="0 0 100 8", preserveAspectRatio="none", class_="share"
    )

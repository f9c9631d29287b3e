"""The evaluations on held-out prompts, first and last, side by side.

Lines are read from the metrics: known ones first and by name, then whatever else the
evaluations logged. A change has a colour where more is known to be better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.report.markup import Markup, tag
from mega_agentrl.report.scale import number
from mega_agentrl.report.table import Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.metric_log import MetricLine

_FIRST = (
    ("sampled/reward", "reward"),
    ("sampled/success", "success"),
    ("greedy/reward", "reward, greedy"),
    ("greedy/success", "success, greedy"),
    ("sampled/rollout/tool_use", "answers with a tool"),
    ("sampled/rollout/calls_mean", "calls per answer"),
    ("sampled/rollout/response_tokens", "response tokens"),
    ("sampled/rollout/entropy", "entropy, nats"),
)
_BY_SOURCE = ("sampled/success/", "sampled/reward/", "greedy/success/", "greedy/reward/")
_ERROR = "_se"
_MORE_IS_BETTER = ("reward", "success", "pass", "mean@")


def held_out_rows(before: Mapping[str, float], after: Mapping[str, float]) -> list[Row]:
    """Rows of metrics that either evaluation has; those of single rollouts' parts are left out."""
    names = list(dict.fromkeys([*before, *after]))
    chosen = [(name, label) for name, label in _FIRST if name in names]
    for head in _BY_SOURCE:
        kind, measure, _ = head.split("/")
        suffix = ", greedy" if kind == "greedy" else ""
        chosen += [
            (name, f"{measure} on {name.removeprefix(head)}{suffix}")
            for name in names
            if name.startswith(head)
        ]
    known = {name for name, _ in chosen}
    for name in names:
        is_rest = name not in known and "/rollout/" not in name and not name.startswith("time/")
        if is_rest and not name.endswith(_ERROR):
            chosen.append((name, name.removeprefix("sampled/")))
    return [
        Row(
            label=label,
            before=before.get(name),
            after=after.get(name),
            before_se=before.get(name + _ERROR),
            after_se=after.get(name + _ERROR),
        )
        for name, label in chosen
    ]


def held_out_table(lines: Sequence[MetricLine]) -> Markup:
    """The table of the first and the last evaluation; of a single one where there is one."""
    first, last = lines[0], lines[-1]
    if len(lines) == 1:
        rows = held_out_rows(first.values, {})
        heads = ["", f"after step {first.step}"]
    else:
        rows = held_out_rows(first.values, last.values)
        heads = ["", f"after step {first.step}", f"after step {last.step}", "change"]
    body = [
        tag(
            "tr",
            tag("th", row.label, scope="row"),
            tag("td", _cell(row.before, row.before_se)),
            *([tag("td", _cell(row.after, row.after_se)), _change(row)] if len(lines) > 1 else []),
        )
        for row in rows
    ]
    head = tag("tr", *(tag("th", name, scope="col") for name in heads))
    return tag("table", tag("thead", head), tag("tbody", *body), class_="figures", id="held-out")


def _cell(value: float | None, error: float | None) -> Markup:
    if value is None:
        return tag("span", "-")
    spread = "" if error is None else tag("small", f" ± {number(error)}")
    return tag("span", number(value), spread)


def _change(row: Row) -> Markup:
    change = row.change
    if change is None:
        return tag("td", "-")
    is_better = row.label.startswith(_MORE_IS_BETTER)
    kind = None if not is_better or change == 0 else "up" if change > 0 else "down"
    sign = "+" if change > 0 else ""
    return tag("td", f"{sign}{number(change)}", class_=kind)

"""Table of the first and the last held-out evaluation.

Known metrics come first, with labels, then all other metrics of the evaluations. Changes are
coloured if higher is known to be better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.report.page.axes import format_number
from mega_agentrl.report.page.html import SafeHtml, html_element
from mega_agentrl.report.validation_console import EvalComparisonRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.report.metrics_file import MetricLine

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
    names = list(dict.fromkeys([*before, *after]))
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
        is_rest = name not in known and "/rollout/" not in name and not name.startswith("time/")
        if is_rest and not name.endswith(_STANDARD_ERROR_SUFFIX):
            chosen.append((name, name.removeprefix("sampled/")))
    return [
        EvalComparisonRow(
            label=label,
            before=before.get(name),
            after=after.get(name),
            before_se=before.get(name + _STANDARD_ERROR_SUFFIX),
            after_se=after.get(name + _STANDARD_ERROR_SUFFIX),
        )
        for name, label in chosen
    ]


def validation_table(lines: Sequence[MetricLine]) -> SafeHtml:
    """Render the first and the last evaluation, or a single one."""
    first, last = lines[0], lines[-1]
    if len(lines) == 1:
        rows = validation_rows(first.values, {})
        heads = ["", f"after step {first.step}"]
    else:
        rows = validation_rows(first.values, last.values)
        heads = ["", f"after step {first.step}", f"after step {last.step}", "change"]
    body = [
        html_element(
            "tr",
            html_element("th", row.label, scope="row"),
            html_element("td", _html_cell(row.before, row.before_se)),
            *(
                [html_element("td", _html_cell(row.after, row.after_se)), _html_change_cell(row)]
                if len(lines) > 1
                else []
            ),
        )
        for row in rows
    ]
    head = html_element("tr", *(html_element("th", name, scope="col") for name in heads))
    return html_element(
        "table",
        html_element("thead", head),
        html_element("tbody", *body),
        class_="figures",
        id="held-out",
    )


def _html_cell(value: float | None, error: float | None) -> SafeHtml:
    if value is None:
        return html_element("span", "-")
    spread = "" if error is None else html_element("small", f" ± {format_number(error)}")
    return html_element("span", format_number(value), spread)


def _html_change_cell(row: EvalComparisonRow) -> SafeHtml:
    change = row.change
    if change is None:
        return html_element("td", "-")
    is_better = row.label.startswith(_HIGHER_IS_BETTER)
    kind = None if not is_better or change == 0 else "up" if change > 0 else "down"
    sign = "+" if change > 0 else ""
    return html_element("td", f"{sign}{format_number(change)}", class_=kind)

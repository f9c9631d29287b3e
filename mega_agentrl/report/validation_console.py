"""Console tables of held-out evaluations: before and after training, or a single evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(slots=True, kw_only=True, frozen=True)
class EvalSummary:
    """Means of a held-out evaluation over all sampled answers."""

    reward: float
    """Mean reward."""
    success: float
    """Fraction of correct answers."""
    tool_use_fraction: float
    """Fraction of answers with at least one tool call."""
    response_tokens_mean: float
    """Mean response length, tool answers included."""
    num_questions: int
    num_answers: int
    """Number of sampled answers."""
    reward_se: float | None = None
    """Standard error of the mean reward over questions; None if unknown."""
    greedy_success: float | None = None
    """Success of one greedy answer per question; None if not evaluated."""
    success_by_source: Mapping[str, float] = field(default_factory=dict)
    """Success by data source."""
    calls_by_tool: Mapping[str, float] = field(default_factory=dict)
    """Calls per answer, by tool."""


@dataclass(slots=True, kw_only=True, frozen=True)
class EvalComparisonRow:
    """A row of the table."""

    label: str
    """Name of the metric."""
    before: float | None
    """Value of the first evaluation; None if it has none."""
    after: float | None
    """Value of the last evaluation; None if it has none."""
    digits: int = 3
    """Decimal places."""
    before_se: float | None = None
    """Standard error of `before`."""
    after_se: float | None = None
    """Standard error of `after`."""

    @property
    def change(self) -> float | None:
        """Difference after minus before."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


def eval_comparison_rows(before: EvalSummary, after: EvalSummary) -> list[EvalComparisonRow]:
    """Return the rows, including data sources and tools of either evaluation."""
    rows = [
        EvalComparisonRow(
            label="reward",
            before=before.reward,
            after=after.reward,
            before_se=before.reward_se,
            after_se=after.reward_se,
        ),
        EvalComparisonRow(label="success", before=before.success, after=after.success),
    ]
    for source in _sorted_names(before.success_by_source, after.success_by_source):
        old, new = before.success_by_source.get(source), after.success_by_source.get(source)
        rows.append(EvalComparisonRow(label=f"  {source}", before=old, after=new))
    if before.greedy_success is not None or after.greedy_success is not None:
        old, new = before.greedy_success, after.greedy_success
        rows.append(EvalComparisonRow(label="success, greedy", before=old, after=new))
    rows.append(
        EvalComparisonRow(
            label="answers with a tool",
            before=before.tool_use_fraction,
            after=after.tool_use_fraction,
        )
    )
    for tool in _sorted_names(before.calls_by_tool, after.calls_by_tool):
        old, new = before.calls_by_tool.get(tool), after.calls_by_tool.get(tool)
        rows.append(
            EvalComparisonRow(label=f"  {tool} calls per answer", before=old, after=new, digits=2)
        )
    old, new = before.response_tokens_mean, after.response_tokens_mean
    rows.append(EvalComparisonRow(label="response tokens", before=old, after=new, digits=1))
    return rows


def _sorted_names(*maps: Mapping[str, float]) -> Iterator[str]:
    yield from sorted({name for values in maps for name in values})


def eval_comparison_table(before: EvalSummary, after: EvalSummary) -> Table:
    """Build the table for rich."""
    table = Table(
        title=f"held out: {after.num_questions} questions, {after.num_answers} answers",
        title_justify="left",
    )
    table.add_column("")
    for head in ("before", "after", "change"):
        table.add_column(head, justify="right")
    for row in eval_comparison_rows(before, after):
        table.add_row(
            Text(row.label),
            _console_cell(row.before, row.digits, row.before_se),
            _console_cell(row.after, row.digits, row.after_se),
            _console_change_cell(row),
        )
    return table


def print_eval_comparison(
    before: EvalSummary, after: EvalSummary, console: Console | None = None
) -> None:
    """Print the table; plain text without a terminal."""
    (console or Console()).print(eval_comparison_table(before, after))


def print_evaluation(summary: EvalSummary, console: Console | None = None) -> None:
    """Print a single evaluation."""
    table = Table(
        title=f"held out: {summary.num_questions} questions, {summary.num_answers} answers",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("held out", justify="right")
    for row in eval_comparison_rows(summary, summary):
        table.add_row(Text(row.label), _console_cell(row.before, row.digits, row.before_se))
    (console or Console()).print(table)


def _console_cell(value: float | None, digits: int, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def _console_change_cell(row: EvalComparisonRow) -> Text:
    if row.change is None:
        return Text("-")
    style = "green" if row.change > 0 else "red" if row.change < 0 else ""
    return Text(f"{row.change:+.{row.digits}f}", style=style)

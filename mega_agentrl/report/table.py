"""The table at the end of a run: the held-out numbers before and after, side by side, or those
of the one evaluation that there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(slots=True, kw_only=True, frozen=True)
class EvalView:
    """One held-out evaluation as it is shown; means over all sampled answers.

    reward, success: mean reward and share of correct answers. reward_se: standard error of
        the mean reward over questions, None if unknown.
    success_by_source: success by `data_source`.
    greedy_success: of one greedy answer per question, None if not asked for.
    tool_use: share of answers with at least one call. calls_by_tool: calls per answer.
    response_tokens: mean length, tool answers included.
    num_questions, num_answers: what the means are over.
    """

    reward: float
    success: float
    tool_use: float
    response_tokens: float
    num_questions: int
    num_answers: int
    reward_se: float | None = None
    greedy_success: float | None = None
    success_by_source: Mapping[str, float] = field(default_factory=dict)
    calls_by_tool: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class Row:
    """One line of the table; a value is None where that evaluation has none."""

    label: str
    before: float | None
    after: float | None
    digits: int = 3
    before_se: float | None = None
    after_se: float | None = None

    @property
    def change(self) -> float | None:
        """After minus before."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


def comparison_rows(before: EvalView, after: EvalView) -> list[Row]:
    """The lines, in order; sources and tools that appear in either evaluation."""
    rows = [
        Row(
            label="reward",
            before=before.reward,
            after=after.reward,
            before_se=before.reward_se,
            after_se=after.reward_se,
        ),
        Row(label="success", before=before.success, after=after.success),
    ]
    for source in _names(before.success_by_source, after.success_by_source):
        old, new = before.success_by_source.get(source), after.success_by_source.get(source)
        rows.append(Row(label=f"  {source}", before=old, after=new))
    if before.greedy_success is not None or after.greedy_success is not None:
        old, new = before.greedy_success, after.greedy_success
        rows.append(Row(label="success, greedy", before=old, after=new))
    rows.append(Row(label="answers with a tool", before=before.tool_use, after=after.tool_use))
    for tool in _names(before.calls_by_tool, after.calls_by_tool):
        old, new = before.calls_by_tool.get(tool), after.calls_by_tool.get(tool)
        rows.append(Row(label=f"  {tool} calls per answer", before=old, after=new, digits=2))
    old, new = before.response_tokens, after.response_tokens
    rows.append(Row(label="response tokens", before=old, after=new, digits=1))
    return rows


def _names(*maps: Mapping[str, float]) -> Iterator[str]:
    yield from sorted({name for values in maps for name in values})


def comparison_table(before: EvalView, after: EvalView) -> Table:
    """The table as rich draws it."""
    table = Table(
        title=f"held out: {after.num_questions} questions, {after.num_answers} answers",
        title_justify="left",
    )
    table.add_column("")
    for head in ("before", "after", "change"):
        table.add_column(head, justify="right")
    for row in comparison_rows(before, after):
        table.add_row(
            Text(row.label),
            _cell(row.before, row.digits, row.before_se),
            _cell(row.after, row.digits, row.after_se),
            _change(row),
        )
    return table


def print_comparison(before: EvalView, after: EvalView, console: Console | None = None) -> None:
    """Print it; plain text where there is no terminal."""
    (console or Console()).print(comparison_table(before, after))


def print_evaluation(view: EvalView, console: Console | None = None) -> None:
    """Print a single evaluation."""
    table = Table(
        title=f"held out: {view.num_questions} questions, {view.num_answers} answers",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("held out", justify="right")
    for row in comparison_rows(view, view):
        table.add_row(Text(row.label), _cell(row.before, row.digits, row.before_se))
    (console or Console()).print(table)


def _cell(value: float | None, digits: int, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if error is None else f"{value:.{digits}f} ± {error:.{digits}f}"


def _change(row: Row) -> Text:
    if row.change is None:
        return Text("-")
    style = "green" if row.change > 0 else "red" if row.change < 0 else ""
    return Text(f"{row.change:+.{row.digits}f}", style=style)

"""Console tables of held-out evaluations: before and after training, or a single evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_REWARD, _SUCCESS = 0, 1
"""Indices in the pairs of `EvalSummary.question_means`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ScoredCount:
    """Number of answers that a mean covers, of all answers."""

    num_scored: int
    num_answers: int

    def __str__(self) -> str:
        """Return the count if answers are missing, else an empty text."""
        if self.num_scored == self.num_answers:
            return ""
        return f"{self.num_scored} of {self.num_answers} scored"


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
    scored: ScoredCount | None = None
    """Answers that the means cover; None if unknown."""
    scored_by_source: Mapping[str, ScoredCount] = field(default_factory=dict)
    """Answers that the means cover, by data source, with those that have no scored answer."""
    first_failure: str = ""
    """Why the first failed answer failed; empty if none did."""
    question_means: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Reward and success of each question with a scored answer, by data source (empty for all) and
    prompt id."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PairedChange:
    """The change of a mean over the questions that both evaluations have scored."""

    change: float | None
    """Mean difference after minus before over these questions; None if there are none."""
    num_questions: int


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
    before_scored: ScoredCount | None = None
    """Answers that `before` covers; None if unknown."""
    after_scored: ScoredCount | None = None
    """Answers that `after` covers; None if unknown."""
    paired: PairedChange | None = None
    """Change over the questions that both have scored; None if it was not computed."""

    @property
    def has_missing(self) -> bool:
        """Whether `before` and `after` may cover different answers, because some failed."""
        return bool(str(self.before_scored or "") or str(self.after_scored or ""))

    @property
    def change(self) -> float | None:
        """Difference after minus before; if answers failed, over the questions scored in both."""
        if self.has_missing and self.paired is not None:
            return self.paired.change
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def change_note(self) -> str:
        """Note on the answers that `change` covers, if some failed."""
        if not self.has_missing or self.before is None or self.after is None:
            return ""
        if self.paired is None:
            return "different answers"
        return f"{self.paired.num_questions} questions scored in both"


def eval_comparison_rows(before: EvalSummary, after: EvalSummary) -> list[EvalComparisonRow]:
    """Return the rows, including data sources and tools of either evaluation."""
    rows = [
        EvalComparisonRow(
            label="reward",
            before=before.reward,
            after=after.reward,
            before_se=before.reward_se,
            after_se=after.reward_se,
            before_scored=before.scored,
            after_scored=after.scored,
            paired=_paired_change(before, after, "", _REWARD),
        ),
        EvalComparisonRow(
            label="success",
            before=before.success,
            after=after.success,
            before_scored=before.scored,
            after_scored=after.scored,
            paired=_paired_change(before, after, "", _SUCCESS),
        ),
    ]
    for source in _sorted_names(
        before.success_by_source,
        after.success_by_source,
        before.scored_by_source,
        after.scored_by_source,
    ):
        rows.append(
            EvalComparisonRow(
                label=f"  {source}",
                before=before.success_by_source.get(source),
                after=after.success_by_source.get(source),
                before_scored=before.scored_by_source.get(source),
                after_scored=after.scored_by_source.get(source),
                paired=_paired_change(before, after, source, _SUCCESS),
            )
        )
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


def _paired_change(
    before: EvalSummary, after: EvalSummary, source: str, index: int
) -> PairedChange:
    """Return the change of the reward (`_REWARD`) or the success (`_SUCCESS`) of a data source."""
    old, new = (summary.question_means.get(source, {}) for summary in (before, after))
    changes = [new[name][index] - old[name][index] for name in old if name in new]
    return PairedChange(change=fmean(changes) if changes else None, num_questions=len(changes))


def _sorted_names(*maps: Mapping[str, object]) -> Iterator[str]:
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
            _console_cell(row.before, row.digits, row.before_se, row.before_scored),
            _console_cell(row.after, row.digits, row.after_se, row.after_scored),
            _console_change_cell(row),
        )
    return table


def print_eval_comparison(
    before: EvalSummary, after: EvalSummary, console: Console | None = None
) -> None:
    """Print the table; plain text without a terminal."""
    console = console or Console()
    console.print(eval_comparison_table(before, after))
    _print_failures(console, before=before, after=after)


def print_evaluation(summary: EvalSummary, console: Console | None = None) -> None:
    """Print a single evaluation."""
    table = Table(
        title=f"held out: {summary.num_questions} questions, {summary.num_answers} answers",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("held out", justify="right")
    for row in eval_comparison_rows(summary, summary):
        cell = _console_cell(row.before, row.digits, row.before_se, row.before_scored)
        table.add_row(Text(row.label), cell)
    console = console or Console()
    console.print(table)
    _print_failures(console, evaluation=summary)


def _print_failures(console: Console, **summaries: EvalSummary) -> None:
    """Print for each evaluation how many answers failed, and why the first one did."""
    for when, summary in summaries.items():
        if summary.first_failure and summary.scored is not None:
            num_failed = summary.scored.num_answers - summary.scored.num_scored
            text = (
                f"held out, {when}: {num_failed} of {summary.scored.num_answers} answers failed "
                f"and are excluded from all means; first failure: {summary.first_failure}"
            )
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def _console_cell(
    value: float | None, digits: int, error: float | None, scored: ScoredCount | None
) -> str:
    if value is None:
        text = "-"
    elif error is None:
        text = f"{value:.{digits}f}"
    else:
        text = f"{value:.{digits}f} ± {error:.{digits}f}"
    # On a line of its own, so that narrow terminals do not break it.
    return f"{text}\n{scored or ''}".rstrip()


def _console_change_cell(row: EvalComparisonRow) -> Text:
    note = f"\n{row.change_note}".rstrip()
    if row.change is None:
        return Text(f"-{note}")
    style = "green" if row.change > 0 else "red" if row.change < 0 else ""
    return Text(f"{row.change:+.{row.digits}f}{note}", style=style)

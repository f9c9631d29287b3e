"""Several runs beside each other: one table, as text, Markdown and JSON, and one plot.

Runs that differ in nothing but their seed are one row: means over the runs that are finished, and
the sample standard deviation of the reward where there are two or more. What a row is called is
what its overrides (of runs that are no sweep's: its settings) do not share with the other rows.
Runs that failed or are not finished count in no mean and are listed with the reason.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from mega_agentrl.report.comparison import NOTHING, RunCurve, write_plot
from mega_agentrl.report.run_result import DONE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mega_agentrl.report.run_result import RunResult

MOST_SHOWN = 4
"""Settings in the name of a row at most, where they are not overrides that somebody typed."""

_HEADINGS = (
    "settings", "runs", "reward before", "reward after", "success after", "tokens", "tool calls",
    "minutes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Means over the finished runs of one group, nan without one. num_runs: all of the group.

    before_spread, after_spread: sample standard deviation over runs, None of fewer than two.
    """

    name: str
    num_runs: int
    num_done: int
    before: float
    before_spread: float | None
    after: float
    after_spread: float | None
    success: float
    num_tokens: float
    num_calls: float
    minutes: float


def sweep_rows(runs: Sequence[RunResult]) -> list[SweepRow]:
    """A row for each group of runs, in the order of their first runs."""
    return [_row(name, group) for name, group in named_groups(runs).items()]


def named_groups(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Runs that differ in nothing but their seed, by what the group is called."""
    groups: dict[tuple[str, ...], list[RunResult]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    shared = set.intersection(*(set(key) for key in groups)) if len(groups) > 1 else set()
    named: dict[str, list[RunResult]] = {}
    for key, group in groups.items():
        own = [one for one in key if one not in shared]
        if not group[0].overrides:
            own = own[:MOST_SHOWN] + ["..."] * (len(own) > MOST_SHOWN)
        name = ", ".join(own) if len(groups) > 1 and own else group[0].name
        # Two groups may look alike where one misses what the other has.
        name = f"{name} ({group[0].name})" if name in named else name
        named[name] = group
    return named


def markdown(runs: Sequence[RunResult]) -> str:
    """The table, and below it what is not in its means."""
    lines = [_line(_HEADINGS), _line(["---"] * len(_HEADINGS))]
    lines += [_line(_cells(row)) for row in sweep_rows(runs)]
    left_out = [run for run in runs if run.state != DONE]
    if left_out:
        lines.append("")
    for run in left_out:
        why = run.reason.splitlines()[0] if run.reason else "it was killed, or is still running"
        lines.append(f"* {run.name}: {run.state}: {why}")
    return "\n".join(lines) + "\n"


def as_json(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Rows and single runs as plain values; nan is null."""
    plain = {
        "rows": [asdict(row) for row in sweep_rows(runs)],
        "runs": [
            {key: value for key, value in asdict(run).items() if key != "settings"} for run in runs
        ],
    }
    cleaned: dict[str, Any] = _finite(plain)
    return cleaned


def write_sweep(out: Path, runs: Sequence[RunResult]) -> str:
    """Write comparison.md, comparison.json and comparison.png into `out`; returns the table.

    The plot has the finished runs, by their held-out marks; without any there is none.
    """
    text = markdown(runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.md").write_text(text, encoding="utf-8")
    (out / "comparison.json").write_text(json.dumps(as_json(runs), indent=1) + "\n")
    if curves := curves_of(runs):
        write_plot(out / "comparison.png", curves, baseline="", title=out.resolve().name)
    return text


def curves_of(runs: Sequence[RunResult]) -> list[RunCurve]:
    """Curves of the finished runs; where those of a group differ in how often they were
    evaluated, of the first and the last evaluation only.
    """
    curves = []
    for name, group in named_groups(runs).items():
        done = [run for run in group if run.state == DONE and run.marks]
        alike = len({len(run.marks) for run in done}) == 1
        for run in done:
            marks = run.marks if alike else (run.marks[0], run.marks[-1])
            curves.append(RunCurve(algorithm=name, seed=run.seed, marks=marks))
    return curves


def _identity(run: RunResult) -> tuple[str, ...]:
    """What runs that are one row have in common."""
    if run.overrides:
        return tuple(
            one for one in run.overrides if one.lstrip("+").split("=")[0] not in ("seed", "run_dir")
        )
    return tuple(f"{key}={value}" for key, value in run.settings.items())


def _row(name: str, group: Sequence[RunResult]) -> SweepRow:
    done = [run for run in group if run.state == DONE]
    marked = [run for run in done if run.marks]
    before, after = [run.marks[0] for run in marked], [run.marks[-1] for run in marked]
    return SweepRow(
        name=name,
        num_runs=len(group),
        num_done=len(done),
        before=_mean([mark.reward for mark in before]),
        before_spread=_spread([mark.reward for mark in before]),
        after=_mean([mark.reward for mark in after]),
        after_spread=_spread([mark.reward for mark in after]),
        success=_mean([mark.success for mark in after]),
        num_tokens=_mean([run.num_tokens for run in done]),
        num_calls=_mean([run.num_calls for run in done]),
        minutes=_mean([run.seconds / 60 for run in done]),
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _cells(row: SweepRow) -> list[str]:
    count = str(row.num_runs)
    if row.num_done < row.num_runs:
        count = f"{row.num_done} of {row.num_runs}"
    return [
        row.name.replace("|", "\\|"),
        count,
        _with_spread(row.before, row.before_spread),
        _with_spread(row.after, row.after_spread),
        _shown(row.success, ".3f"),
        _shown(row.num_tokens, ",.0f"),
        _shown(row.num_calls, ",.0f"),
        _shown(row.minutes, ".1f"),
    ]


def _with_spread(value: float, spread: float | None) -> str:
    return _shown(value, ".3f") + ("" if spread is None else f" ± {spread:.3f}")


def _shown(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else NOTHING


def _finite(value: Any) -> Any:
    """The same with null where JSON has no number."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

"""The scoreboard: algorithms on several tasks, with 95 % intervals over seeds, as page and figure.

An interval is the percentile bootstrap of a mean over seeds. The differences of an algorithm to the
baseline are taken seed by seed, and count only if their interval excludes 0. If all n differences
have the same sign, it always excludes 0, which happens by chance with probability 2^(1-n).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mega_agentrl.report.compare.algorithms import MISSING_CELL, RunCostCurve, markdown_row

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

LEVEL = 0.95
NUM_RESAMPLES = 10_000
_ROW_HEIGHT = 0.24
_COLOURS = {"better": "#0f9d76", "worse": "#c2410c", "baseline": "#1f77d0"}
_OTHER_COLOUR = "#4b5563"


class Verdict(StrEnum):
    """Result of an algorithm against the baseline."""

    better = "better"
    worse = "worse"
    no_difference = "no difference shown"
    baseline = "baseline"
    too_few = "too few seeds"
    """Fewer than two seeds in common with the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over seeds and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """The finished runs of a task."""

    title: str
    curves: Sequence[RunCostCurve]
    """Scored runs; the first point of each is the warm start's."""
    learning_rates: Mapping[str, float]
    """Chosen learning rate by algorithm."""
    tuning_rewards: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    """Reward on the development questions by algorithm and learning rate; empty without tuning."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Algorithms that cannot run on the task, with the reason."""
    stopped: Mapping[str, str] = field(default_factory=dict)
    """Names of runs that ended before their budget was spent, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One algorithm on one task."""

    algorithm: str
    num_seeds: int
    reward: Interval
    """Held-out reward at the end."""
    difference: Interval | None
    """Difference to the baseline on common seeds; None for the baseline or fewer than two seeds."""
    verdict: Verdict
    num_tokens: float
    """Tokens sampled, mean over the seeds."""


def bootstrap_interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % percentile bootstrap interval; the resamples are seeded."""
    resamples = np.random.default_rng(0).choice(np.asarray(values), (NUM_RESAMPLES, len(values)))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resamples.mean(axis=1), [tail, 1 - tail])
    return Interval(mean=fmean(values), low=float(low), high=float(high))


def compare_paired(
    rewards: Mapping[int, float], baseline: Mapping[int, float]
) -> tuple[Interval | None, Verdict]:
    """Compare rewards by seed with the baseline's on the seeds that both have."""
    seeds = sorted(rewards.keys() & baseline.keys())
    if len(seeds) < 2:
        return None, Verdict.too_few
    difference = bootstrap_interval([rewards[seed] - baseline[seed] for seed in seeds])
    if difference.low > 0:
        return difference, Verdict.better
    return difference, Verdict.worse if difference.high < 0 else Verdict.no_difference


def score_rows(task: TaskScores, *, baseline: str) -> list[ScoreRow]:
    """Return a row for each algorithm, the highest mean reward first."""
    rewards: dict[str, dict[int, float]] = {}
    tokens: dict[str, list[int]] = {}
    for curve in task.curves:
        end = curve.eval_points[-1]
        rewards.setdefault(curve.algorithm, {})[curve.seed] = end.reward
        tokens.setdefault(curve.algorithm, []).append(end.num_tokens)
    rows = []
    for name, by_seed in rewards.items():
        difference, verdict = compare_paired(by_seed, rewards.get(baseline, {}))
        if name == baseline:
            difference, verdict = None, Verdict.baseline
        rows.append(
            ScoreRow(
                algorithm=name,
                num_seeds=len(by_seed),
                reward=bootstrap_interval(list(by_seed.values())),
                difference=difference,
                verdict=verdict,
                num_tokens=fmean(tokens[name]),
            )
        )
    return sorted(rows, key=lambda row: (-row.reward.mean, row.algorithm))


def scoreboard_markdown(
    tasks: Sequence[TaskScores], *, baseline: str, introduction: str, figure: str
) -> str:
    """Return the page.

    Args:
        tasks: Tasks with finished runs.
        baseline: Algorithm that the others are compared with.
        introduction: When, how and on what the numbers were measured.
        figure: Path of the figure, relative to the page.
    """
    rows = {task.title: score_rows(task, baseline=baseline) for task in tasks}
    parts = [
        "# Scoreboard",
        introduction,
        f"![Held-out reward of every algorithm with its 95 % interval]({figure})",
        "## Who wins",
        _conclusions(tasks, rows, baseline),
    ]
    for task in tasks:
        parts += [f"## {task.title}", _task_table(task, rows[task.title], baseline)]
        parts += _task_notes(task)
    return "\n\n".join(parts) + "\n"


def _conclusions(
    tasks: Sequence[TaskScores], rows: Mapping[str, Sequence[ScoreRow]], baseline: str
) -> str:
    lines = []
    for task in tasks:
        task_rows = rows[task.title]
        by_verdict = {
            verdict: [f"`{row.algorithm}`" for row in task_rows if row.verdict is verdict]
            for verdict in Verdict
        }
        if better := by_verdict[Verdict.better]:
            text = f"{', '.join(better)} {_verb(better)} better than `{baseline}`."
        elif any(row.difference for row in task_rows):
            text = f"**Nobody is better than `{baseline}`.**"
        else:
            text = "Nothing is compared yet."
        if worse := by_verdict[Verdict.worse]:
            text += f" {', '.join(worse)} {_verb(worse)} worse."
        if other_rate := _differing_rates(task, task_rows, baseline):
            text += (
                f" Of these, {', '.join(other_rate)} had another learning rate than `{baseline}`, "
                "which may be the cause."
            )
        if equal := by_verdict[Verdict.no_difference]:
            text += f" No difference is shown for {', '.join(equal)}."
        if too_few := by_verdict[Verdict.too_few]:
            text += f" Too few seeds: {', '.join(too_few)}."
        lines.append(f"* {task.title}: {text}")
    return "\n".join([*lines, *_overall(rows, baseline)])


def _differing_rates(task: TaskScores, rows: Sequence[ScoreRow], baseline: str) -> list[str]:
    """Return the better and worse algorithms whose learning rate is not the baseline's."""
    return [
        f"`{row.algorithm}`"
        for row in rows
        if row.verdict in (Verdict.better, Verdict.worse)
        and task.learning_rates[row.algorithm] != task.learning_rates[baseline]
    ]


def _verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _overall(rows: Mapping[str, Sequence[ScoreRow]], baseline: str) -> list[str]:
    """Return the winners on every task, and how many differences to expect by chance."""
    compared = [row for task_rows in rows.values() for row in task_rows if row.difference]
    if not compared:
        return []
    wins = Counter(row.algorithm for row in compared if row.verdict is Verdict.better)
    winners = [f"`{name}`" for name, count in wins.items() if count == len(rows)]
    expected = sum(2.0 ** (1 - row.num_seeds) for row in compared)
    return [
        f"* On every task: {', '.join(winners) or 'nobody'} {_verb(winners or [''])} better than "
        f"`{baseline}`.",
        f"* Between equal algorithms, at least {expected:.1f} of these {len(compared)} comparisons "
        "would show a difference by chance: all seeds have the same sign.",
    ]


def _task_table(task: TaskScores, rows: Sequence[ScoreRow], baseline: str) -> str:
    names = (
        "algorithm",
        "seeds",
        "learning rate",
        "held-out reward",
        f"difference to {baseline}",
        "verdict",
        "tokens",
    )
    lines = [markdown_row(names), markdown_row(["---"] * len(names))]
    for row in rows:
        cells = (
            f"`{row.algorithm}`",
            str(row.num_seeds),
            f"{task.learning_rates[row.algorithm]:g}",
            f"{row.reward:.3f}" if row.num_seeds > 1 else f"{row.reward.mean:.3f}",
            MISSING_CELL if row.difference is None else f"{row.difference:+.3f}",
            row.verdict,
            f"{row.num_tokens:,.0f}",
        )
        lines.append(markdown_row(cells))
    return "\n".join(lines)


def _task_notes(task: TaskScores) -> list[str]:
    notes = []
    if task.curves:
        warm = task.curves[0].eval_points[0]
        notes.append(f"Before training the reward is {warm.reward:.3f}.")
    if task.tuning_rewards:
        lines = [
            f"* `{name}`: "
            + ", ".join(f"{rate:g} gives {reward:.3f}" for rate, reward in by_rate.items())
            for name, by_rate in task.tuning_rewards.items()
        ]
        notes.append("Learning rates tried, with the reward on the development questions:")
        notes.append("\n".join(lines))
    for heading, reasons in (
        ("Ended early, and counted with their last reward:", task.stopped),
        ("Not run:", task.skipped),
    ):
        if reasons:
            lines = [f"* `{name}`: {reason}" for name, reason in reasons.items()]
            notes += [heading, "\n".join(lines)]
    return notes


def write_scoreboard_figure(path: Path, tasks: Sequence[TaskScores], *, baseline: str) -> None:
    """Write an SVG with a panel per task: the reward of each algorithm and its interval."""
    rows = [score_rows(task, baseline=baseline) for task in tasks]
    height = 1.2 + _ROW_HEIGHT * max((len(task_rows) for task_rows in rows), default=1)
    with mpl.rc_context({"svg.hashsalt": "scoreboard"}):  # equal numbers give equal bytes
        figure = Figure(figsize=(4.2 * max(1, len(tasks)), height), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        panels = figure.subplots(1, max(1, len(tasks)), squeeze=False)[0]
        for axes, task, task_rows in zip(panels, tasks, rows, strict=False):
            _plot_task(axes, task, task_rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.print_svg(str(path), metadata={"Date": None})


def _plot_task(axes: Axes, task: TaskScores, rows: Sequence[ScoreRow]) -> None:
    for height, row in enumerate(reversed(rows)):
        colour = _COLOURS.get(row.verdict, _OTHER_COLOUR)
        axes.plot([row.reward.low, row.reward.high], [height, height], color=colour, linewidth=2)
        axes.plot(row.reward.mean, height, "o", color=colour, markersize=5)
        if row.verdict is Verdict.baseline:
            axes.axvline(row.reward.mean, color=colour, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [row.algorithm for row in reversed(rows)])
    if task.curves:
        warm = task.curves[0].eval_points[0].reward
        axes.axvline(warm, color=_OTHER_COLOUR, linewidth=0.8, linestyle="--")
    axes.set_title(task.title, fontsize="medium")
    axes.set_xlabel("held-out reward")
    axes.grid(visible=True, axis="x", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

"""Several algorithms on one task: a table and a plot of held-out reward against what it cost.

Every run has the same number of marks, held-out evaluations at the same shares of a budget, so
that the k-th marks of an algorithm's seeds belong together: their mean is the algorithm's curve,
lowest and highest its band. Costs are tokens the policy generated and tool calls it made.

    calls to the baseline's reward    first point of an algorithm's curve, linear between marks,
                                      whose reward is at least the baseline's at its end; as a
                                      share of the calls that the baseline made in all

The baseline gets the same measure: less than 100 % where its curve was that high before its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

_COLOURS = ("#4b5563", "#1f77d0", "#d97706", "#0f9d76", "#b5179e", "#7c5cff", "#c2410c")
_BAND_ALPHA = 0.13
NOTHING = "-"


@dataclass(slots=True, kw_only=True, frozen=True)
class Mark:
    """One held-out evaluation and what the run had spent by then."""

    num_tokens: int
    num_calls: int
    reward: float
    success: float


@dataclass(slots=True, kw_only=True, frozen=True)
class RunCurve:
    """One run: the marks in order, the first before training."""

    algorithm: str
    seed: int
    marks: tuple[Mark, ...]

    def __post_init__(self) -> None:
        if not self.marks:
            raise ValueError(f"{self.algorithm}, seed {self.seed}: got no marks, expected some")


@dataclass(slots=True, kw_only=True, frozen=True)
class MeanMark:
    """Means over the seeds of an algorithm at one mark, and the band of the reward."""

    num_tokens: float
    num_calls: float
    reward: float
    lowest: float
    highest: float


@dataclass(slots=True, kw_only=True, frozen=True)
class Row:
    """One algorithm. reward_spread: sample standard deviation over seeds, None of one seed.

    num_tokens, num_calls: means over the seeds. calls_to_reach: see the module, None where the
    curve never gets there or there is no baseline; reach_share: of the baseline's calls.
    """

    algorithm: str
    num_seeds: int
    reward: float
    reward_spread: float | None
    success: float
    num_tokens: float
    num_calls: float
    calls_to_reach: float | None
    reach_share: float | None


def mean_curve(curves: Sequence[RunCurve]) -> list[MeanMark]:
    """The curve of one algorithm; raises `ValueError` where the runs differ in their marks."""
    lengths = {len(curve.marks) for curve in curves}
    if len(lengths) != 1:
        got = ", ".join(f"seed {curve.seed}: {len(curve.marks)}" for curve in curves)
        name = curves[0].algorithm if curves else "no run"
        raise ValueError(
            f"{name}: expected runs of the same number of marks, got {got or 'none'}; probable "
            "cause: runs of different settings in one folder"
        )
    return [
        MeanMark(
            num_tokens=fmean(mark.num_tokens for mark in marks),
            num_calls=fmean(mark.num_calls for mark in marks),
            reward=fmean(mark.reward for mark in marks),
            lowest=min(mark.reward for mark in marks),
            highest=max(mark.reward for mark in marks),
        )
        for marks in zip(*(curve.marks for curve in curves), strict=True)
    ]


def calls_to_reach(marks: Sequence[MeanMark], reward: float) -> float | None:
    """Calls at the first point of the curve whose reward is at least `reward`, if there is one."""
    if marks and marks[0].reward >= reward:
        return marks[0].num_calls
    for before, after in pairwise(marks):
        if after.reward >= reward:
            way = (reward - before.reward) / (after.reward - before.reward)
            return before.num_calls + way * (after.num_calls - before.num_calls)
    return None


def summarize(curves: Sequence[RunCurve], *, baseline: str) -> list[Row]:
    """A row for each algorithm, in the order of its first run."""
    by_name = _by_algorithm(curves)
    target, its_calls = None, 0.0
    if baseline in by_name:
        end = mean_curve(by_name[baseline])[-1]
        target, its_calls = end.reward, end.num_calls
    return [_row(name, runs, target, its_calls) for name, runs in by_name.items()]


def markdown_table(rows: Sequence[Row], *, baseline: str) -> str:
    """The rows as a table."""
    names = (
        "algorithm",
        "seeds",
        "held-out reward",
        "success",
        "tokens",
        "tool calls",
        f"calls to {baseline}'s reward",
        f"share of {baseline}'s",
    )
    lines = [_line(names), _line(["---"] * len(names))]
    for row in rows:
        spread = "" if row.reward_spread is None else f" ± {row.reward_spread:.3f}"
        cells = (
            row.algorithm,
            str(row.num_seeds),
            f"{row.reward:.3f}{spread}",
            f"{row.success:.3f}",
            f"{row.num_tokens:,.0f}",
            f"{row.num_calls:,.0f}",
            NOTHING if row.calls_to_reach is None else f"{row.calls_to_reach:,.0f}",
            NOTHING if row.reach_share is None else f"{row.reach_share:.0%}",
        )
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def write_plot(path: Path, curves: Sequence[RunCurve], *, baseline: str, title: str = "") -> None:
    """Write a PNG of two panels, reward against tokens and against tool calls.

    Raises `ValueError` where there is nothing to draw.
    """
    by_name = {name: mean_curve(runs) for name, runs in _by_algorithm(curves).items()}
    if not by_name:
        raise ValueError(f"comparison {path}: no run, nothing to draw")
    figure = Figure(figsize=(11.0, 4.6), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, field, label in (
        (panels[0], "num_tokens", "tokens generated"),
        (panels[1], "num_calls", "tool calls made"),
    ):
        _draw(axes, by_name, field)
        if baseline in by_name:
            end = by_name[baseline][-1].reward
            axes.axhline(end, color=_COLOURS[0], linewidth=0.8, linestyle=":")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(visible=True, alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("held-out reward")
    panels[1].legend(loc="lower right", fontsize="small", frameon=False)
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def _draw(axes: Axes, by_name: dict[str, list[MeanMark]], field: str) -> None:
    for number, (name, marks) in enumerate(by_name.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        cost = [float(getattr(mark, field)) for mark in marks]
        reward = [mark.reward for mark in marks]
        axes.plot(cost, reward, "o-", color=colour, markersize=3, linewidth=1.6, label=name)
        lowest, highest = [mark.lowest for mark in marks], [mark.highest for mark in marks]
        axes.fill_between(cost, lowest, highest, color=colour, alpha=_BAND_ALPHA, linewidth=0)


def _row(name: str, runs: Sequence[RunCurve], target: float | None, its_calls: float) -> Row:
    marks = mean_curve(runs)
    ends = [run.marks[-1] for run in runs]
    reach = None if target is None else calls_to_reach(marks, target)
    return Row(
        algorithm=name,
        num_seeds=len(runs),
        reward=marks[-1].reward,
        reward_spread=stdev(end.reward for end in ends) if len(ends) > 1 else None,
        success=fmean(end.success for end in ends),
        num_tokens=marks[-1].num_tokens,
        num_calls=marks[-1].num_calls,
        calls_to_reach=reach,
        reach_share=None if reach is None or not its_calls else reach / its_calls,
    )


def _by_algorithm(curves: Sequence[RunCurve]) -> dict[str, list[RunCurve]]:
    by_name: dict[str, list[RunCurve]] = {}
    for curve in curves:
        by_name.setdefault(curve.algorithm, []).append(curve)
    return by_name


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

"""Plot the reward curve of a run: every step, a running mean and the held-out evaluations.

Uses matplotlib's Agg canvas without pyplot, which needs no display and no global state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mega_agentrl.errors import InputError
from mega_agentrl.report.metrics_file import running_mean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

_STEP_COLOUR = "#9db8d9"
_MEAN_COLOUR = "#1f5fa8"
_EVAL_COLOUR = "#c2410c"


@dataclass(slots=True, kw_only=True, frozen=True)
class StepPoint:
    """Mean reward and success of the trajectories sampled in a training step."""

    step: int
    reward: float
    success: float


@dataclass(slots=True, kw_only=True, frozen=True)
class EvalPoint:
    """Held-out evaluation after `step` steps (0: before training)."""

    step: int
    reward: float
    success: float


def write_reward_curve(
    path: Path,
    points: Sequence[StepPoint],
    held_out: Sequence[EvalPoint] = (),
    *,
    title: str = "",
    window: int = 5,
) -> None:
    """Write the PNG, creating its folder.

    Args:
        path: file to write.
        points: training steps in order.
        held_out: evaluations in order of steps.
        title: title of the plot.
        window: steps of the running mean.

    Raises:
        ValueError: there are neither steps nor evaluations.
    """
    if not points and not held_out:
        raise InputError(f"points of reward curve {path}", 0, "a step or an evaluation to draw")
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    reward_axes, success_axes = figure.subplots(2, 1, sharex=True)
    for axes, name in ((reward_axes, "reward"), (success_axes, "success")):
        _plot_panel(axes, name, points, held_out, window)
    reward_axes.set_title(title)
    success_axes.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def _plot_panel(
    axes: Axes,
    name: str,
    points: Sequence[StepPoint],
    held_out: Sequence[EvalPoint],
    window: int,
) -> None:
    steps = [point.step for point in points]
    values = [float(getattr(point, name)) for point in points]
    if points:
        axes.plot(steps, values, color=_STEP_COLOUR, linewidth=1, label="sampled, each step")
        label = f"sampled, mean of {window} steps"
        axes.plot(steps, running_mean(values, window), color=_MEAN_COLOUR, label=label)
    if held_out:
        eval_values = [float(getattr(point, name)) for point in held_out]
        eval_steps = [point.step for point in held_out]
        axes.plot(eval_steps, eval_values, "o--", color=_EVAL_COLOUR, label="held out")
    axes.set_ylabel(name)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")

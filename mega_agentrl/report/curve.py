"""The reward curve of a run as a PNG: every step, a running mean, the held-out evaluations.

Drawn through matplotlib's Agg canvas without pyplot, so that nothing global is touched and no
display is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mega_agentrl.report.smooth import running_mean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

_STEP_COLOUR = "#9db8d9"
_MEAN_COLOUR = "#1f5fa8"
_HELD_OUT_COLOUR = "#c2410c"


@dataclass(slots=True, kw_only=True, frozen=True)
class CurvePoint:
    """One training step: mean reward and success of what was sampled in it."""

    step: int
    reward: float
    success: float


@dataclass(slots=True, kw_only=True, frozen=True)
class HeldOutPoint:
    """One held-out evaluation after `step` steps (0: before training)."""

    step: int
    reward: float
    success: float


def write_curve(
    path: Path,
    points: Sequence[CurvePoint],
    held_out: Sequence[HeldOutPoint] = (),
    *,
    title: str = "",
    window: int = 5,
) -> None:
    """Write the PNG; its folder is made. Raises `ValueError` where there is nothing to draw.

    points, held_out: in order of step. window: steps of the running mean.
    """
    if not points and not held_out:
        raise ValueError(f"reward curve {path}: no step and no evaluation, nothing to draw")
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    reward_axes, success_axes = figure.subplots(2, 1, sharex=True)
    for axes, name in ((reward_axes, "reward"), (success_axes, "success")):
        _draw(axes, name, points, held_out, window)
    reward_axes.set_title(title)
    success_axes.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(str(path))


def _draw(
    axes: Axes,
    name: str,
    points: Sequence[CurvePoint],
    held_out: Sequence[HeldOutPoint],
    window: int,
) -> None:
    steps = [point.step for point in points]
    values = [float(getattr(point, name)) for point in points]
    if points:
        axes.plot(steps, values, color=_STEP_COLOUR, linewidth=1, label="sampled, each step")
        label = f"sampled, mean of {window} steps"
        axes.plot(steps, running_mean(values, window), color=_MEAN_COLOUR, label=label)
    if held_out:
        marks = [float(getattr(point, name)) for point in held_out]
        held_steps = [point.step for point in held_out]
        axes.plot(held_steps, marks, "o--", color=_HELD_OUT_COLOUR, label="held out")
    axes.set_ylabel(name)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")

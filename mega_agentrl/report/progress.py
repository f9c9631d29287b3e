"""Progress of a stage of a run: a live bar on a terminal, plain lines elsewhere.

A stage (warm start, evaluation, RL) has a known number of steps. After each step the caller calls
`update` with a `StepSummary`, which redraws the bar; there is no refresh thread. Without a terminal
lines are printed at the start and the end of the stage, for the first and the last step, for the
first step with a warning, and at most every `plain_every_s` seconds in between.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

_ETA_WINDOW_STEPS = 10
_BAR_WIDTH = 24


@dataclass(slots=True, kw_only=True, frozen=True)
class StepSummary:
    """Summary of a finished step for the console."""

    step: int
    """Number of finished steps, from 1."""
    metrics: Mapping[str, float]
    """Metrics to show, in order (reward, success, loss)."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, in order."""
    tokens_per_s: float | None = None
    """Throughput of the whole step; None is not shown."""
    unique_tokens_per_s: float | None = None
    """The same with tokens that trajectories share counted once; None is not shown."""
    warning: str = ""
    """Warning for the user at the end of the line; empty for none."""

    def headline(self) -> str:
        """Return the metrics as one line."""
        return "  ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())

    def details(self) -> str:
        """Return the times of the step and its phases, and the throughput, as one line."""
        parts = []
        if self.phase_s:
            inner = " · ".join(f"{name} {seconds:.2f}" for name, seconds in self.phase_s.items())
            parts.append(f"step {sum(self.phase_s.values()):.2f} s = {inner}")
        if self.tokens_per_s is not None:
            unique = self.unique_tokens_per_s
            once = "" if unique is None else f" ({unique:,.0f} unique)"
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s{once}")
        return "  ".join(parts)


class EtaEstimator:
    """Estimates the remaining time from the mean duration of recent steps."""

    def __init__(
        self, num_steps: int, clock: Callable[[], float] = time.monotonic, *, num_done: int = 0
    ) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._step_times: deque[tuple[int, float]] = deque(
            [(num_done, clock())], maxlen=_ETA_WINDOW_STEPS + 1
        )

    def update(self, step: int) -> float:
        """Record that `step` steps are done and return the remaining seconds."""
        self._step_times.append((step, self._clock()))
        first_step, first_s = self._step_times[0]
        last_step, last_s = self._step_times[-1]
        if last_step <= first_step:
            return 0.0
        return (last_s - first_s) / (last_step - first_step) * max(self._num_steps - step, 0)


class StageProgress:
    """Shows the progress of a stage, as a context manager.

    Args:
        title: name of the stage.
        num_steps: number of steps of the stage.
        console: output; standard output by default.
        plain_every_s: minimum time between lines without a terminal.
        clock: returns the time in seconds.
        num_done: steps done before a resumed run started.
    """

    def __init__(
        self,
        title: str,
        num_steps: int,
        *,
        console: Console | None = None,
        plain_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        num_done: int = 0,
    ) -> None:
        self._title = title
        self._num_steps = num_steps
        self._console = console or Console()
        self._plain_every_s = plain_every_s
        self._clock = clock
        self._eta_estimator = EtaEstimator(num_steps, clock, num_done=num_done)
        self._start_s = clock()
        self._last_summary: StepSummary | None = None
        self._last_line_s: float | None = None
        self._has_warned = False
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        if self._console.is_terminal:
            start = self._render(None, "")
            self._live = Live(start, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self.print_line(f"{self._title} ...")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        duration = format_duration(self._clock() - self._start_s)
        took = f"took {duration}" if error is None else f"ended after {duration}"
        if self._live is not None:
            self._live.update(self._render(self._last_summary, took), refresh=True)
            self._live.stop()
            self._live = None
        else:
            self.print_line(f"{self._title} {took}")

    def update(self, summary: StepSummary) -> None:
        """Show a finished step."""
        self._last_summary = summary
        eta = f"eta {format_duration(self._eta_estimator.update(summary.step))}"
        if self._live is not None:
            self._live.update(self._render(summary, eta), refresh=True)
        elif self._should_print(summary):
            self._last_line_s = self._clock()
            self._has_warned |= summary.warning != ""
            line = f"{self._title} {summary.step}/{self._num_steps}  {summary.headline()}  {eta}"
            parts = (line, summary.details(), summary.warning)
            self.print_line("  ".join(part for part in parts if part))

    def print_line(self, text: str) -> None:
        """Print a line, above the bar on a terminal."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _should_print(self, summary: StepSummary) -> bool:
        if self._last_line_s is None or summary.step >= self._num_steps:
            return True
        if summary.warning and not self._has_warned:
            return True
        return self._clock() - self._last_line_s >= self._plain_every_s

    def _render(self, summary: StepSummary | None, times: str) -> Group:
        """Render the bar, or only title and time before the first step."""
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [Text(self._title, style="bold")]
        if summary:
            total = max(self._num_steps, 1)
            cells.append(ProgressBar(total=total, completed=summary.step, width=_BAR_WIDTH))
            cells += [Text(f"{summary.step}/{self._num_steps}"), Text(summary.headline())]
        row.add_row(*cells, Text(times or "...", style="dim"))
        lines: list[RenderableType] = [row]
        if summary and (details := summary.details()):
            lines.append(Text(f"  {details}", style="dim"))
        if summary and summary.warning:
            lines.append(Text(f"  {summary.warning}", style="red"))
        return Group(*lines)


def format_duration(seconds: float) -> str:
    """Format seconds as `0:07`, `3:05` or `2:03:05`."""
    total_s = round(max(seconds, 0.0))
    hours, rest_s = divmod(total_s, 3600)
    minutes, seconds_left = divmod(rest_s, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"

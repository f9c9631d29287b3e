"""The progress of one stage of a run: a live bar on a terminal, plain lines elsewhere.

A stage (warm start, evaluation, RL) has a known number of steps. After each step its owner
calls `show` with a `StepView`; nothing here measures time of training or computes a metric.
The bar is redrawn only in `show`: there is no refresh thread. In a log file (no terminal) the
same text is printed: when the stage begins and ends, and between them the first step, the last
and at most one every `plain_every_s` seconds.
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

_WINDOW = 10
_BAR_WIDTH = 24


@dataclass(slots=True, kw_only=True, frozen=True)
class StepView:
    """What a person sees of one finished step.

    step: steps done, from 1. values: shown in order as `name 0.123` (reward, success, loss).
    phase_s: seconds by phase, in order. tokens_per_s: of the whole step; None is not shown.
    """

    step: int
    values: Mapping[str, float]
    phase_s: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None

    def headline(self) -> str:
        """Values on one line."""
        return "  ".join(f"{name} {value:.3f}" for name, value in self.values.items())

    def details(self) -> str:
        """Seconds of the step and of each phase, and throughput, on one line."""
        parts = []
        if self.phase_s:
            inner = " · ".join(f"{name} {seconds:.2f}" for name, seconds in self.phase_s.items())
            parts.append(f"step {sum(self.phase_s.values()):.2f} s = {inner}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        return "  ".join(parts)


class StepClock:
    """Seconds left, from the mean of the last steps' durations."""

    def __init__(
        self, num_steps: int, clock: Callable[[], float] = time.monotonic, *, num_done: int = 0
    ) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque([(num_done, clock())], maxlen=_WINDOW + 1)

    def mark(self, step: int) -> float:
        """Note that `step` steps are done; returns the seconds left."""
        self._marks.append((step, self._clock()))
        first_step, first_s = self._marks[0]
        last_step, last_s = self._marks[-1]
        if last_step <= first_step:
            return 0.0
        return (last_s - first_s) / (last_step - first_step) * max(self._num_steps - step, 0)


class StageProgress:
    """Shows one stage; a context manager.

    console: where to; the default is standard output. plain_every_s: see the module. num_done:
    steps that were made before, in a run that goes on.
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
        self._left = StepClock(num_steps, clock, num_done=num_done)
        self._start_s = clock()
        self._view: StepView | None = None
        self._last_line_s: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        if self._console.is_terminal:
            start = self._render(None, "")
            self._live = Live(start, console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        else:
            self.note(f"{self._title} ...")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lasted = duration(self._clock() - self._start_s)
        took = f"took {lasted}" if error is None else f"ended after {lasted}"
        if self._live is not None:
            self._live.update(self._render(self._view, took), refresh=True)
            self._live.stop()
            self._live = None
        else:
            self.note(f"{self._title} {took}")

    def show(self, view: StepView) -> None:
        """Show a finished step."""
        self._view = view
        eta = f"eta {duration(self._left.mark(view.step))}"
        if self._live is not None:
            self._live.update(self._render(view, eta), refresh=True)
        elif self._is_due(view.step):
            self._last_line_s = self._clock()
            line = f"{self._title} {view.step}/{self._num_steps}  {view.headline()}  {eta}"
            self.note(f"{line}  {view.details()}".rstrip())

    def note(self, text: str) -> None:
        """Print a line of its own, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, step: int) -> bool:
        if self._last_line_s is None or step >= self._num_steps:
            return True
        return self._clock() - self._last_line_s >= self._plain_every_s

    def _render(self, view: StepView | None, times: str) -> Group:
        """The bar; a stage that has shown no step is a title and its time."""
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [Text(self._title, style="bold")]
        if view:
            total = max(self._num_steps, 1)
            cells.append(ProgressBar(total=total, completed=view.step, width=_BAR_WIDTH))
            cells += [Text(f"{view.step}/{self._num_steps}"), Text(view.headline())]
        row.add_row(*cells, Text(times or "...", style="dim"))
        details = view.details() if view else ""
        return Group(row, Text(f"  {details}", style="dim")) if details else Group(row)


def duration(seconds: float) -> str:
    """`0:07`, `3:05`, `2:03:05`."""
    whole = round(max(seconds, 0.0))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"

"""Read `metrics.jsonl` as series of values, in whatever state a run left the file; smooth them.

A run that continues, its page and a comparison of runs read the file here. If a step occurs twice
because the run was resumed, the last line counts. Unreadable lines, such as a partial last line of
a killed run, are skipped and counted. Values may be nan or infinite; values that are not numbers
are ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

MetricSeries = list[tuple[int, float]]
"""Pairs of step and value, in ascending order of steps."""

FIRST_FAILURE_METRIC = "rollout/first_failure"
"""Metric whose value is text: why the first failed trajectory of the step failed."""

MAX_LINE_BYTES = 1 << 24
"""Bytes of a line; one with 10,000 metrics has a tenth of that. A longer one cannot be read."""
MAX_STEP = 1 << 53
"""Largest number of a step."""

VALIDATION_METRICS = ("sampled/reward", "greedy/reward")
"""Metrics that mark a line as an evaluation on held-out prompts."""


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricLine:
    """A line of the file: the metrics of a step of a stage."""

    stage: str
    step: int
    values: Mapping[str, float]
    first_failure: str = ""
    """Why the first failed trajectory failed; empty if none did."""

    @property
    def is_validation(self) -> bool:
        """Whether the line is an evaluation."""
        return any(name in self.values for name in VALIDATION_METRICS)

    @property
    def duration_s(self) -> float:
        """Duration of the step, the sum of all phases; times that are not finite are left out."""
        times = (value for name, value in self.values.items() if name.startswith("time/"))
        return sum(value for value in times if math.isfinite(value))


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricLog:
    """All lines in order of writing, with each stage and step once."""

    lines: tuple[MetricLine, ...] = ()
    num_unreadable_lines: int = 0
    _names: dict[str, list[str]] = field(default_factory=dict)

    def lines_of_stage(self, stage: str) -> list[MetricLine]:
        """Return the lines of a stage in order of steps."""
        lines = [line for line in self.lines if line.stage == stage]
        return sorted(lines, key=lambda line: line.step)

    def series(self, stage: str, name: str) -> MetricSeries:
        """Return the values of a metric by step."""
        return [
            (line.step, line.values[name])
            for line in self.lines_of_stage(stage)
            if name in line.values
        ]

    def metric_names(self, stage: str) -> list[str]:
        """Return the metric names of a stage in order of first appearance."""
        if stage not in self._names:
            names = dict.fromkeys(
                name for line in self.lines_of_stage(stage) for name in line.values
            )
            self._names[stage] = list(names)
        return self._names[stage]

    def validation_lines(self) -> list[MetricLine]:
        """Return the evaluations on held-out prompts in order of writing."""
        return [line for line in self.lines if line.is_validation]


def read_metrics(path: Path) -> MetricLog:
    """Read a metrics file; the log is empty if there is no file."""
    if not path.is_file():
        return MetricLog()
    with path.open("rb") as file:
        return parse_metrics(iter_lines(file))


def iter_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a metrics file; one that is longer than `MAX_LINE_BYTES` in pieces."""
    while text := file.readline(MAX_LINE_BYTES):
        yield text


def parse_metrics(lines: Iterable[bytes | str]) -> MetricLog:
    """Parse lines of JSON."""
    line_by_step: dict[tuple[str, int], MetricLine] = {}
    num_unreadable = 0
    for text in lines:
        if not text.strip():
            continue
        line = parse_line(text)
        if line is None:
            num_unreadable += 1
        else:
            line_by_step.pop((line.stage, line.step), None)
            line_by_step[line.stage, line.step] = line
    return MetricLog(lines=tuple(line_by_step.values()), num_unreadable_lines=num_unreadable)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each position, of fewer at the start."""
    if window < 1:
        raise InputError("window of a running mean", window, "at least 1")
    windows = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(window_values) / len(window_values) for window_values in windows]


def parse_line(text: bytes | str) -> MetricLine | None:
    """Return what a line says; None if it is none of a run."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    stage, step = record.pop("stage", None), record.pop("step", None)
    if not isinstance(stage, str) or type(step) is not int or not 0 <= step <= MAX_STEP:
        return None
    values = {name: _to_float(value) for name, value in record.items() if _is_number(value)}
    reason = record.get(FIRST_FAILURE_METRIC)
    return MetricLine(
        stage=stage,
        step=step,
        values=values,
        first_failure=reason if isinstance(reason, str) else "",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_float(value: float) -> float:
    """Return the number as a float; infinity if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf

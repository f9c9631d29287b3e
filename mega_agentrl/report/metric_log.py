"""The metrics of a run as series: `metrics.jsonl` read back, whatever state a run left it in.

A step that is there twice (a run that was resumed) counts as it was written last. Half a line
at the end, where a run was killed while it wrote, is left out and counted. Values may be nan or
infinite; what is no number is no metric.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Points = list[tuple[int, float]]
"""Steps, ascending, with a value each."""

HELD_OUT = ("sampled/reward", "greedy/reward")
"""A line with one of these metrics is an evaluation on held-out prompts."""


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricLine:
    """One line: the metrics of one step of one stage."""

    stage: str
    step: int
    values: Mapping[str, float]

    @property
    def is_held_out(self) -> bool:
        """Whether it is an evaluation."""
        return any(name in self.values for name in HELD_OUT)


@dataclass(slots=True, kw_only=True, frozen=True)
class MetricLog:
    """All lines, in order of writing, each stage and step once."""

    lines: tuple[MetricLine, ...] = ()
    num_unread: int = 0
    _names: dict[str, list[str]] = field(default_factory=dict)

    def of(self, stage: str) -> list[MetricLine]:
        """Lines of a stage, by step."""
        found = [line for line in self.lines if line.stage == stage]
        return sorted(found, key=lambda line: line.step)

    def series(self, stage: str, name: str) -> Points:
        """Values of a metric by step."""
        return [(line.step, line.values[name]) for line in self.of(stage) if name in line.values]

    def names(self, stage: str) -> list[str]:
        """Metrics of a stage, in the order they first appear."""
        if stage not in self._names:
            found = dict.fromkeys(name for line in self.of(stage) for name in line.values)
            self._names[stage] = list(found)
        return self._names[stage]

    def held_out(self) -> list[MetricLine]:
        """Evaluations on held-out prompts, in order of writing."""
        return [line for line in self.lines if line.is_held_out]


def read_metrics(path: Path) -> MetricLog:
    """The log of a file; an empty one where there is no file."""
    if not path.is_file():
        return MetricLog()
    with path.open("rb") as file:
        return parse_metrics(file)


def parse_metrics(lines: Iterable[bytes | str]) -> MetricLog:
    """The log of lines of JSON."""
    found: dict[tuple[str, int], MetricLine] = {}
    num_unread = 0
    for text in lines:
        if not text.strip():
            continue
        line = _line(text)
        if line is None:
            num_unread += 1
        else:
            found.pop((line.stage, line.step), None)
            found[line.stage, line.step] = line
    return MetricLog(lines=tuple(found.values()), num_unread=num_unread)


def _line(text: bytes | str) -> MetricLine | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    stage, step = record.pop("stage", None), record.pop("step", None)
    if not isinstance(stage, str) or not isinstance(step, int):
        return None
    values = {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return MetricLine(stage=stage, step=step, values=values)

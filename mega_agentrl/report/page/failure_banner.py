"""The lines of the red banner: how many trajectories failed, and why the first one failed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mega_agentrl.report.page.chart_groups import RL_STAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.report.metrics_file import MetricLine, MetricLog

MIN_SHOWN_FRACTION = 0.01
"""Share of failed trajectories from which the banner appears; a few are lost in healthy runs."""


def failure_lines(log: MetricLog) -> list[str]:
    """Return a line about training and about each evaluation in which many trajectories failed."""
    return [*_training_lines(log), *_validation_lines(log)]


def _training_lines(log: MetricLog) -> Iterator[str]:
    lines = log.lines_of_stage(RL_STAGE)
    num_total = sum(_value(line, "rollout/num_trajectories") for line in lines)
    num_failed = sum(
        _value(line, "rollout/num_trajectories") * _value(line, "rollout/failed_fraction")
        for line in lines
    )
    yield from _describe("In training", num_failed, num_total, "trajectories", lines)


def _validation_lines(log: MetricLog) -> Iterator[str]:
    for line in log.validation_lines():
        num_total = _value(line, "sampled/num_answers")
        num_failed = num_total - _value(line, "sampled/num_scored")
        where = f"Held out, after step {line.step}"
        yield from _describe(where, num_failed, num_total, "answers", [line])


def _describe(
    where: str, num_failed: float, num_total: float, what: str, lines: Sequence[MetricLine]
) -> Iterator[str]:
    if not num_total or num_failed / num_total < MIN_SHOWN_FRACTION:
        return
    reason = next((line.first_failure for line in lines if line.first_failure), "unknown")
    yield (
        f"{where}, {num_failed:,.0f} of {num_total:,.0f} {what} failed "
        f"({num_failed / num_total:.0%}) and are excluded from all means. First failure: {reason}"
    )


def _value(line: MetricLine, name: str) -> float:
    value = line.values.get(name, 0.0)
    return value if math.isfinite(value) else 0.0

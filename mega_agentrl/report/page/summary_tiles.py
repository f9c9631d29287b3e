"""Summary tiles at the top of the page, computed from the metrics alone.

They do not use `summary.json`, which a killed run lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from mega_agentrl.report.page.axes import format_number
from mega_agentrl.report.page.chart_groups import RL_STAGE
from mega_agentrl.report.page.html import render_template
from mega_agentrl.report.progress import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from mega_agentrl.report.metrics_file import MetricLog

NUM_EDGE_STEPS = 5
"""Number of first and last steps that are compared if there was no evaluation."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SummaryTile:
    """A tile with one number."""

    name: str
    """Name of the number."""
    value: str
    """Formatted value."""
    before: str = ""
    """Formatted value at the start."""
    detail: str = ""
    """Line below the value."""
    change: float = 0.0
    """Difference of value and start."""


_MAX_VALUE = 1e100


def summary_tiles(log: MetricLog) -> list[SummaryTile]:
    """Return the tiles that the log has metrics for."""
    tiles = [
        _outcome_tile(log, "reward"),
        _outcome_tile(log, "success"),
        _num_steps_tile(log),
        _throughput_tile(log),
    ]
    tiles += [_entropy_tile(log), _branching_tile(log), _mismatch_tile(log)]
    return [tile for tile in tiles if tile is not None]


def render_tiles(tiles: Sequence[SummaryTile]) -> Markup:
    """Render the tiles as cards."""
    return render_template("tiles.html", tiles=tiles)


def _outcome_tile(log: MetricLog, measure: str) -> SummaryTile | None:
    """Compare the evaluations before and after, else the first and last steps of training."""
    name = f"sampled/{measure}"
    values = [line.values[name] for line in log.validation_lines() if name in line.values]
    where = "held out, before and after"
    if len(values) < 2:
        steps = _finite_values(log, f"rollout/{measure}_unfiltered")
        if not steps and not values:
            return None
        if steps:
            values = [fmean(steps[:NUM_EDGE_STEPS]), fmean(steps[-NUM_EDGE_STEPS:])]
            where = f"in training, first and last {min(NUM_EDGE_STEPS, len(steps))} steps"
        else:
            where = "held out"
    before, after = values[0], values[-1]
    return SummaryTile(
        name=measure,
        value=_format_3_digits(after),
        before=_format_3_digits(before) if len(values) > 1 else "",
        detail=where,
        change=after - before,
    )


def _num_steps_tile(log: MetricLog) -> SummaryTile | None:
    lines = log.lines_of_stage(RL_STAGE)
    if not lines:
        return None
    total_s = min(sum(line.duration_s for line in lines), _MAX_VALUE)
    detail = f"{format_duration(total_s)}, {_format_3_digits(total_s / len(lines))} s each"
    return SummaryTile(name="RL steps", value=f"{len(lines):,}", detail=detail)


def _throughput_tile(log: MetricLog) -> SummaryTile | None:
    speeds = _finite_values(log, "perf/tokens_per_s")
    if not speeds:
        return None
    tokens = sum(
        line.values.get("perf/tokens_per_s", 0.0) * line.duration_s
        for line in log.lines_of_stage(RL_STAGE)
    )
    details = ["median"]
    if unique := _finite_values(log, "perf/unique_tokens_per_s"):
        details.append(f"{_format_3_digits(median(unique))} with shared tokens once")
    if math.isfinite(tokens):
        details.append(f"{_format_3_digits(tokens)} in all")
    value = _format_3_digits(median(speeds))
    return SummaryTile(name="tokens/s", value=value, detail="; ".join(details))


def _entropy_tile(log: MetricLog) -> SummaryTile | None:
    values = _finite_values(log, "rollout/entropy")
    if not values:
        return None
    return SummaryTile(
        name="policy entropy",
        value=_format_3_digits(values[-1]),
        before=_format_3_digits(values[0]),
        detail="nats, first and last step",
    )


def _branching_tile(log: MetricLog) -> SummaryTile | None:
    forks = _finite_values(log, "rollout/forks_per_prompt")
    saved = _finite_values(log, "rollout/tokens_saved_fraction")
    if not any(forks):
        return None
    detail = f"{fmean(saved):.1%} of the tokens shared" if saved else "mean over steps"
    return SummaryTile(name="forks per tree", value=_format_3_digits(fmean(forks)), detail=detail)


def _mismatch_tile(log: MetricLog) -> SummaryTile | None:
    gaps = _finite_values(log, "mismatch/logp_mean_abs")
    largest = _finite_values(log, "mismatch/logp_max_abs")
    if not gaps:
        return None
    detail = f"nats; largest {_format_3_digits(max(largest))}" if largest else "nats"
    return SummaryTile(
        name="engine against trainer", value=_format_3_digits(fmean(gaps)), detail=detail
    )


def _finite_values(log: MetricLog, name: str) -> list[float]:
    """Return the values of which sums are doubles; larger ones are drawn like infinite ones."""
    return [value for _, value in log.series(RL_STAGE, name) if abs(value) <= _MAX_VALUE]


def _format_3_digits(value: float) -> str:
    """Format a number with three significant digits."""
    return format_number(float(f"{value:.3g}"))

"""The figures at the top of the page: what a run came to, from its metrics alone.

A run that was killed has no summary, so everything is read from the metrics it had written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from mega_agentrl.report.chart_choice import RL
from mega_agentrl.report.markup import Markup, tag
from mega_agentrl.report.progress import duration
from mega_agentrl.report.scale import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.report.metric_log import MetricLine, MetricLog

EDGE_STEPS = 5
"""Steps at both ends of training whose means are compared where nothing was held out."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Tile:
    """One figure. before: what it was at the start. more: a line below. rise: after - before."""

    name: str
    value: str
    before: str = ""
    more: str = ""
    rise: float = 0.0


def tiles(log: MetricLog) -> list[Tile]:
    """The figures that the log has."""
    found = [_outcome(log, "reward"), _outcome(log, "success"), _length(log), _speed(log)]
    found += [_entropy(log), _saved(log), _mismatch(log)]
    return [tile for tile in found if tile is not None]


def tile_row(shown: Sequence[Tile]) -> Markup:
    """The figures as cards."""
    cards = []
    for tile in shown:
        kind = "up" if tile.rise > 0 else "down" if tile.rise < 0 else None
        before = tag("span", f"{tile.before} → ", class_="from") if tile.before else ""
        cards.append(
            tag(
                "div",
                tag("div", tile.name, class_="name"),
                tag("div", before, tag("span", tile.value, class_=kind), class_="value"),
                tag("div", tile.more, class_="more"),
                class_="tile card",
            )
        )
    return tag("div", *cards, class_="tiles")


def _outcome(log: MetricLog, measure: str) -> Tile | None:
    """Held out before and after; else the first and the last steps of training."""
    name = f"sampled/{measure}"
    marks = [line.values[name] for line in log.held_out() if name in line.values]
    where = "held out, before and after"
    if len(marks) < 2:
        steps = _values(log, f"rollout/{measure}_seen")
        if not steps and not marks:
            return None
        if steps:
            marks = [fmean(steps[:EDGE_STEPS]), fmean(steps[-EDGE_STEPS:])]
            where = f"in training, first and last {min(EDGE_STEPS, len(steps))} steps"
        else:
            where = "held out"
    before, after = marks[0], marks[-1]
    return Tile(
        name=measure,
        value=number(_three(after)),
        before=number(_three(before)) if len(marks) > 1 else "",
        more=where,
        rise=after - before,
    )


def _length(log: MetricLog) -> Tile | None:
    lines = log.of(RL)
    if not lines:
        return None
    total_s = sum(step_seconds(line) for line in lines)
    more = f"{duration(total_s)}, {number(_three(total_s / len(lines)))} s each"
    return Tile(name="RL steps", value=f"{len(lines):,}", more=more)


def _speed(log: MetricLog) -> Tile | None:
    speeds = _values(log, "perf/tokens_per_s")
    if not speeds:
        return None
    tokens = sum(
        line.values.get("perf/tokens_per_s", 0.0) * step_seconds(line) for line in log.of(RL)
    )
    more = f"median; {number(_three(tokens))} in all" if math.isfinite(tokens) else "median"
    return Tile(name="tokens/s", value=number(_three(median(speeds))), more=more)


def _entropy(log: MetricLog) -> Tile | None:
    values = _values(log, "rollout/entropy")
    if not values:
        return None
    before, after = number(_three(values[0])), number(_three(values[-1]))
    return Tile(name="policy entropy", value=after, before=before, more="nats, first and last step")


def _saved(log: MetricLog) -> Tile | None:
    forks, saved = _values(log, "rollout/forks"), _values(log, "rollout/tokens_saved_share")
    if not forks or not any(forks):
        return None
    more = f"{fmean(saved):.1%} of the tokens shared" if saved else "mean over steps"
    return Tile(name="forks per tree", value=number(_three(fmean(forks))), more=more)


def _mismatch(log: MetricLog) -> Tile | None:
    gaps, worst = _values(log, "mismatch/logp_mean_abs"), _values(log, "mismatch/logp_max_abs")
    if not gaps:
        return None
    more = f"nats; largest {number(_three(max(worst)))}" if worst else "nats"
    return Tile(name="engine against trainer", value=number(_three(fmean(gaps))), more=more)


def step_seconds(line: MetricLine) -> float:
    """Seconds of a step, all phases together."""
    times = (value for name, value in line.values.items() if name.startswith("time/"))
    return sum(value for value in times if math.isfinite(value))


def _values(log: MetricLog, name: str) -> list[float]:
    return [value for _, value in log.series(RL, name) if math.isfinite(value)]


def _three(value: float) -> float:
    """Three digits are enough at this size."""
    return float(f"{value:.3g}")

"""A chart as inline SVG: lines or stacked areas over steps, with what a pointer reads off it.

The drawing needs no script. Beside it lies its data as JSON, from which `charts.js` shows the
values under the pointer. Colours are classes `s0` ... `s7` of the page's style sheet, so that
they follow the light or dark scheme. Values that are nan or infinite break the line and are
marked at the top; of long series every extreme is kept. Knows no metric by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

from mega_agentrl.report.markup import Markup, joined, tag, text
from mega_agentrl.report.scale import Axis, number, value_axis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mega_agentrl.report.metric_log import Points

WIDTH, HEIGHT = 520.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 12.0, 10.0, 24.0
NUM_COLOURS = 8
MOST_POINTS = 400


class Look(StrEnum):
    """How a series is drawn. faint: behind the others. dots: marks joined by a broken line."""

    line = "line"
    faint = "faint"
    dots = "dots"


@dataclass(slots=True, kw_only=True, frozen=True)
class Series:
    """A named line of a chart. colour: number of a colour, None to count on."""

    name: str
    points: Points
    look: Look = Look.line
    colour: int | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class Chart:
    """What is drawn in one picture.

    unit: of the values. note: one sentence about them. stacked: areas on top of each other.
    log: a logarithmic axis. zero: the axis reaches down to 0.
    """

    title: str
    series: Sequence[Series]
    unit: str = ""
    note: str = ""
    stacked: bool = False
    log: bool = False
    zero: bool = True


def chart_data(chart: Chart) -> Mapping[str, object]:
    """What the page's script reads: the values, and where the axis of steps lies."""
    steps = _step_axis(chart)
    return {
        "low": steps.low,
        "high": steps.high,
        "start": steps.start / WIDTH,
        "stop": steps.stop / WIDTH,
        "unit": chart.unit,
        "series": [
            {
                "name": one.name,
                "colour": colour,
                "x": [step for step, _ in points],
                "y": [float(f"{value:.6g}") for _, value in points],
            }
            for one, colour in _coloured(chart)
            for points in (thinned(one.points),)
        ],
    }


def draw(chart: Chart) -> Markup:
    """The chart as an `svg` element; `ValueError` for one without any point."""
    if not any(one.points for one in chart.series):
        raise ValueError(f"chart {chart.title!r}: got no point, expected at least one to draw")
    steps = _step_axis(chart)
    layers = list(_layers(chart)) if chart.stacked else []
    tops = [value for layer in layers for _, _, value in layer.spans]
    plain = [value for one in chart.series for _, value in one.points if math.isfinite(value)]
    values = value_axis(
        tops if chart.stacked else plain,
        HEIGHT - BOTTOM,
        TOP,
        log=chart.log and not chart.stacked,
        zero=chart.zero or chart.stacked,
    )
    drawn = [_area(layer, steps, values) for layer in layers]
    if not chart.stacked:
        ordered = sorted(_coloured(chart), key=lambda pair: pair[0].look is not Look.faint)
        drawn = [_line(one, colour, steps, values) for one, colour in ordered]
    return tag(
        "svg",
        _grid(steps, values),
        *drawn,
        tag("line", class_="cursor", x1=LEFT, x2=LEFT, y1=TOP, y2=HEIGHT - BOTTOM),
        class_="plot",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=chart.title,
    )


def legend(chart: Chart) -> Markup:
    """Names of the series with their colours and last values."""
    items = [
        tag(
            "span",
            tag("i", class_=f"swatch b{colour} {one.look.value}"),
            one.name,
            tag("b", number(one.points[-1][1])) if one.points else "",
            class_="key",
        )
        for one, colour in _coloured(chart)
    ]
    return tag("div", *items, class_="legend")


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` points: of each run of steps the smallest and the largest value.

    The first and the last point are kept, and so is every value that is not finite.
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / max(1, most // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        indices = range(start, min(start + size, len(points)))
        finite = [index for index in indices if math.isfinite(points[index][1])]
        kept.update(index for index in indices if not math.isfinite(points[index][1]))
        if finite:
            kept.add(min(finite, key=lambda index: points[index][1]))
            kept.add(max(finite, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(kept)]


def _coloured(chart: Chart) -> list[tuple[Series, int]]:
    return [
        (one, (index if one.colour is None else one.colour) % NUM_COLOURS)
        for index, one in enumerate(chart.series)
    ]


def _step_axis(chart: Chart) -> Axis:
    steps = [step for one in chart.series for step, _ in one.points]
    low, high = float(min(steps)), float(max(steps))
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Axis(low=low, high=high, start=LEFT, stop=WIDTH - RIGHT)


def _grid(steps: Axis, values: Axis) -> Markup:
    parts: list[object] = []
    for value in values.ticks():
        y = _pixel(values.at(value))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(tag("text", number(value), x=LEFT - 6, y=y, class_="y"))
    whole = [step for step in steps.ticks(7) if step == int(step)]
    for step in whole:
        parts.append(
            tag("text", f"{int(step):,}", x=_pixel(steps.at(step)), y=HEIGHT - 7, class_="x")
        )
    return tag("g", *parts, class_="grid")


def _line(one: Series, colour: int, steps: Axis, values: Axis) -> Markup:
    points = thinned(one.points)
    pieces = []
    for is_shown, run in groupby(points, key=lambda point: _is_shown(point[1], values)):
        if is_shown:
            places = [(steps.at(step), values.at(value)) for step, value in run]
            pieces.append("M" + "L".join(f"{_pixel(x)} {_pixel(y)}" for x, y in places))
    parts = [tag("path", d="".join(pieces), class_=f"line {one.look.value} s{colour}")]
    dotted = one.look is Look.dots or len(points) == 1
    for step, value in points:
        x = _pixel(steps.at(step))
        if not math.isfinite(value):
            parts.append(tag("path", d=f"M{x} {TOP}l-3 -6h6z", class_="broken"))
        elif dotted and _is_shown(value, values):
            parts.append(
                tag("circle", cx=x, cy=_pixel(values.at(value)), r=3.5, class_=f"d{colour}")
            )
    return joined(parts)


def _is_shown(value: float, values: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not values.log)


@dataclass(slots=True, kw_only=True, frozen=True)
class _Layer:
    """An area: step, lower and upper edge."""

    colour: int
    spans: Sequence[tuple[int, float, float]]


def _layers(chart: Chart) -> Iterator[_Layer]:
    """Areas from below; a series that lacks a step, or has no finite value there, adds nothing."""
    steps = sorted({step for one in chart.series for step, _ in one.points})
    if len(steps) > MOST_POINTS:
        stride = math.ceil(len(steps) / MOST_POINTS)
        steps = [*steps[:-1:stride], steps[-1]]
    floor = dict.fromkeys(steps, 0.0)
    for one, colour in _coloured(chart):
        own = dict(one.points)
        spans = []
        for step in steps:
            value = own.get(step, 0.0)
            top = floor[step] + (max(value, 0.0) if math.isfinite(value) else 0.0)
            spans.append((step, floor[step], top))
            floor[step] = top
        yield _Layer(colour=colour, spans=spans)


def _area(layer: _Layer, steps: Axis, values: Axis) -> Markup:
    spans = list(layer.spans)
    if len(spans) == 1:
        (step, low, high), half = spans[0], 0.3
        edges = [(step - half, low, high), (step + half, low, high)]
    else:
        edges = [(float(step), low, high) for step, low, high in spans]
    upper = [f"{_pixel(steps.at(step))} {_pixel(values.at(high))}" for step, _, high in edges]
    lower = [f"{_pixel(steps.at(step))} {_pixel(values.at(low))}" for step, low, _ in edges]
    return tag("path", d=f"M{'L'.join([*upper, *lower[::-1]])}Z", class_=f"area a{layer.colour}")


def _pixel(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def figure(chart: Chart, name: str) -> Markup:
    """The chart with title, legend and note. name: id of its data on the page."""
    title = tag("h3", chart.title, tag("small", f" {chart.unit}") if chart.unit else "")
    note = tag("p", text(chart.note), class_="note") if chart.note else ""
    return tag("figure", title, draw(chart), legend(chart), note, class_="card", data_chart=name)

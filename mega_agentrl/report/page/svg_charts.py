"""Render charts as inline SVG: lines or stacked areas over steps.

The drawing needs no script; `charts.js` reads the values under the pointer from JSON data beside
it. Colours are the classes `s0` ... `s7` of the page's style sheet, which has a light and a dark
scheme. Values that are nan or infinite interrupt the line and are marked at the top. Long series
are downsampled with all extremes kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

from mega_agentrl.report.page.axes import Axis, format_number, make_value_axis
from mega_agentrl.report.page.html import SafeHtml, concat_html, escape_text, html_element

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mega_agentrl.report.metrics_file import MetricSeries

WIDTH, HEIGHT = 520.0, 230.0
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 50.0, 12.0, 10.0, 24.0
NUM_COLOURS = 8
MAX_POINTS = 400


class LineStyle(StrEnum):
    """Style in which a series is drawn."""

    line = "line"
    """A solid line."""
    faint = "faint"
    """A faint line behind the others."""
    dots = "dots"
    """Dots joined by a dashed line."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Series:
    """A named line of a chart."""

    name: str
    """Name in the legend."""
    points: MetricSeries
    """Values by step."""
    line_style: LineStyle = LineStyle.line
    """Style in which the series is drawn."""
    colour: int | None = None
    """Index of the colour; None uses the position in the chart."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Chart:
    """A chart of one or more series."""

    title: str
    """Title."""
    series: Sequence[Series]
    """The lines."""
    unit: str = ""
    """Unit of the values."""
    note: str = ""
    """A sentence about the values."""
    is_stacked: bool = False
    """Draw stacked areas."""
    is_log_scale: bool = False
    """Use a logarithmic axis."""
    includes_zero: bool = True
    """Extend the axis to 0."""


def chart_data(chart: Chart) -> Mapping[str, object]:
    """Return the values and the position of the step axis for the page's script."""
    steps = _step_axis(chart)
    return {
        "low": steps.low,
        "high": steps.high,
        "start": steps.start_px / WIDTH,
        "stop": steps.stop_px / WIDTH,
        "unit": chart.unit,
        "series": [
            {
                "name": one.name,
                "colour": colour,
                "x": [step for step, _ in points],
                "y": [float(f"{value:.6g}") for _, value in points],
            }
            for one, colour in _with_colours(chart)
            for points in (downsample(one.points),)
        ],
    }


def render_svg(chart: Chart) -> SafeHtml:
    """Render a chart as an `svg` element.

    Raises:
        ValueError: the chart has no points.
    """
    if not any(one.points for one in chart.series):
        raise ValueError(f"chart {chart.title!r}: got no point, expected at least one to draw")
    steps = _step_axis(chart)
    layers = list(_stack_areas(chart)) if chart.is_stacked else []
    tops = [value for layer in layers for _, _, value in layer.spans]
    plain = [value for one in chart.series for _, value in one.points if math.isfinite(value)]
    values = make_value_axis(
        tops if chart.is_stacked else plain,
        HEIGHT - MARGIN_BOTTOM,
        MARGIN_TOP,
        log=chart.is_log_scale and not chart.is_stacked,
        zero=chart.includes_zero or chart.is_stacked,
    )
    drawn = [_area_path(layer, steps, values) for layer in layers]
    if not chart.is_stacked:
        ordered = sorted(
            _with_colours(chart), key=lambda pair: pair[0].line_style is not LineStyle.faint
        )
        drawn = [_line_path(one, colour, steps, values) for one, colour in ordered]
    return html_element(
        "svg",
        _grid_lines(steps, values),
        *drawn,
        html_element(
            "line",
            class_="cursor",
            x1=MARGIN_LEFT,
            x2=MARGIN_LEFT,
            y1=MARGIN_TOP,
            y2=HEIGHT - MARGIN_BOTTOM,
        ),
        class_="plot",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_label=chart.title,
    )


def render_legend(chart: Chart) -> SafeHtml:
    """Render the names of the series with their colours and last values."""
    items = [
        html_element(
            "span",
            html_element("i", class_=f"swatch b{colour} {one.line_style.value}"),
            one.name,
            html_element("b", format_number(one.points[-1][1])) if one.points else "",
            class_="key",
        )
        for one, colour in _with_colours(chart)
    ]
    return html_element("div", *items, class_="legend")


def downsample(points: MetricSeries, most: int = MAX_POINTS) -> MetricSeries:
    """Reduce a series to about `most` points: the minimum and maximum of each interval.

    The first and the last point and all values that are not finite are kept.
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


def _with_colours(chart: Chart) -> list[tuple[Series, int]]:
    return [
        (one, (index if one.colour is None else one.colour) % NUM_COLOURS)
        for index, one in enumerate(chart.series)
    ]


def _step_axis(chart: Chart) -> Axis:
    steps = [step for one in chart.series for step, _ in one.points]
    low, high = float(min(steps)), float(max(steps))
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Axis(low=low, high=high, start_px=MARGIN_LEFT, stop_px=WIDTH - MARGIN_RIGHT)


def _grid_lines(steps: Axis, values: Axis) -> SafeHtml:
    parts: list[object] = []
    for value in values.ticks():
        y = _format_coordinate(values.to_pixel(value))
        parts.append(html_element("line", x1=MARGIN_LEFT, x2=WIDTH - MARGIN_RIGHT, y1=y, y2=y))
        parts.append(html_element("text", format_number(value), x=MARGIN_LEFT - 6, y=y, class_="y"))
    whole = [step for step in steps.ticks(7) if step == int(step)]
    for step in whole:
        parts.append(
            html_element(
                "text",
                f"{int(step):,}",
                x=_format_coordinate(steps.to_pixel(step)),
                y=HEIGHT - 7,
                class_="x",
            )
        )
    return html_element("g", *parts, class_="grid")


def _line_path(one: Series, colour: int, steps: Axis, values: Axis) -> SafeHtml:
    points = downsample(one.points)
    pieces = []
    for is_shown, run in groupby(points, key=lambda point: _is_drawable(point[1], values)):
        if is_shown:
            places = [(steps.to_pixel(step), values.to_pixel(value)) for step, value in run]
            pieces.append(
                "M"
                + "L".join(f"{_format_coordinate(x)} {_format_coordinate(y)}" for x, y in places)
            )
    parts = [
        html_element("path", d="".join(pieces), class_=f"line {one.line_style.value} s{colour}")
    ]
    dotted = one.line_style is LineStyle.dots or len(points) == 1
    for step, value in points:
        x = _format_coordinate(steps.to_pixel(step))
        if not math.isfinite(value):
            parts.append(html_element("path", d=f"M{x} {MARGIN_TOP}l-3 -6h6z", class_="broken"))
        elif dotted and _is_drawable(value, values):
            parts.append(
                html_element(
                    "circle",
                    cx=x,
                    cy=_format_coordinate(values.to_pixel(value)),
                    r=3.5,
                    class_=f"d{colour}",
                )
            )
    return concat_html(parts)


def _is_drawable(value: float, values: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not values.is_log_scale)


@dataclass(slots=True, kw_only=True, frozen=True)
class _StackedArea:
    """A stacked area with tuples of step, lower and upper edge."""

    colour: int
    spans: Sequence[tuple[int, float, float]]


def _stack_areas(chart: Chart) -> Iterator[_StackedArea]:
    """Yield the areas from the bottom; missing and non-finite values count as 0."""
    steps = sorted({step for one in chart.series for step, _ in one.points})
    if len(steps) > MAX_POINTS:
        stride = math.ceil(len(steps) / MAX_POINTS)
        steps = [*steps[:-1:stride], steps[-1]]
    floor = dict.fromkeys(steps, 0.0)
    for one, colour in _with_colours(chart):
        own = dict(one.points)
        spans = []
        for step in steps:
            value = own.get(step, 0.0)
            top = floor[step] + (max(value, 0.0) if math.isfinite(value) else 0.0)
            spans.append((step, floor[step], top))
            floor[step] = top
        yield _StackedArea(colour=colour, spans=spans)


def _area_path(layer: _StackedArea, steps: Axis, values: Axis) -> SafeHtml:
    spans = list(layer.spans)
    if len(spans) == 1:
        (step, low, high), half = spans[0], 0.3
        edges = [(step - half, low, high), (step + half, low, high)]
    else:
        edges = [(float(step), low, high) for step, low, high in spans]
    upper = [
        f"{_format_coordinate(steps.to_pixel(step))} {_format_coordinate(values.to_pixel(high))}"
        for step, _, high in edges
    ]
    lower = [
        f"{_format_coordinate(steps.to_pixel(step))} {_format_coordinate(values.to_pixel(low))}"
        for step, low, _ in edges
    ]
    return html_element(
        "path", d=f"M{'L'.join([*upper, *lower[::-1]])}Z", class_=f"area a{layer.colour}"
    )


def _format_coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def render_figure(chart: Chart, name: str) -> SafeHtml:
    """Render a chart with title, legend and note.

    Args:
        chart: the chart.
        name: id of its data on the page.
    """
    title = html_element(
        "h3", chart.title, html_element("small", f" {chart.unit}") if chart.unit else ""
    )
    note = html_element("p", escape_text(chart.note), class_="note") if chart.note else ""
    return html_element(
        "figure",
        title,
        render_svg(chart),
        render_legend(chart),
        note,
        class_="card",
        data_chart=name,
    )

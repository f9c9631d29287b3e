"""Render charts as inline SVG: lines or stacked areas over steps.

The drawing needs no script; `charts.js` reads the values under the pointer from JSON data on the
page. Colours are the classes `s0` ... `s7` of the page's style sheet, which has a light and a dark
scheme. Values that are nan or infinite interrupt the line and are marked at the top. Long series
are downsampled with all extremes kept. No chart library is used, because every page would have to
contain it to open without a network: Plotly's script has about 3 MB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.report.page.axes import Axis, format_number, make_value_axis
from mega_agentrl.report.page.html import render_template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from markupsafe import Markup

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
    series: Sequence[Series]
    """The lines."""
    unit: str = ""
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
                "name": series.name,
                "colour": colour,
                "x": [step for step, _ in points],
                "y": [float(f"{value:.6g}") for _, value in points],
            }
            for series, colour in _with_colours(chart)
            for points in (downsample(series.points),)
        ],
    }


def render_figure(chart: Chart, data_id: str) -> Markup:
    """Render a chart with title, legend and note; `data_id` is the id of its data on the page."""
    return render_template(
        "figure.html",
        chart=chart,
        data_id=data_id,
        plot=render_svg(chart),
        coloured_series=_with_colours(chart),
    )


def render_svg(chart: Chart) -> Markup:
    """Render a chart as an `svg` element.

    Raises:
        ValueError: the chart has no points.
    """
    if not any(series.points for series in chart.series):
        raise InputError(f"points of chart {chart.title!r}", 0, "at least one to draw")
    steps = _step_axis(chart)
    layers = list(_stack_areas(chart)) if chart.is_stacked else []
    tops = [value for layer in layers for _, _, value in layer.spans]
    plain = [value for series in chart.series for _, value in series.points if math.isfinite(value)]
    values = make_value_axis(
        tops if chart.is_stacked else plain,
        HEIGHT - MARGIN_BOTTOM,
        MARGIN_TOP,
        log=chart.is_log_scale and not chart.is_stacked,
        zero=chart.includes_zero or chart.is_stacked,
    )
    faint_first = sorted(
        _with_colours(chart), key=lambda pair: pair[0].line_style is not LineStyle.faint
    )
    return render_template(
        "plot.html",
        title=chart.title,
        view_box=f"0 0 {WIDTH:g} {HEIGHT:g}",
        left=MARGIN_LEFT,
        right=WIDTH - MARGIN_RIGHT,
        top=MARGIN_TOP,
        bottom=HEIGHT - MARGIN_BOTTOM,
        label_y=HEIGHT - 7,
        value_ticks=[
            (format_number(value), _format_coordinate(values.to_pixel(value)))
            for value in values.ticks()
        ],
        step_ticks=[
            (f"{int(step):,}", _format_coordinate(steps.to_pixel(step)))
            for step in steps.ticks(7)
            if step == int(step)
        ],
        areas=[(layer.colour, _area_path(layer, steps, values)) for layer in layers],
        lines=[
            _draw_line(series, colour, steps, values)
            for series, colour in faint_first
            if not chart.is_stacked
        ],
    )


def downsample(points: MetricSeries, max_points: int = MAX_POINTS) -> MetricSeries:
    """Reduce a series to about `max_points` points: the minimum and maximum of each interval.

    The first and the last point and all values that are not finite are kept.
    """
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(len(points) / max(1, max_points // 2))
    selected = {0, len(points) - 1}
    for start in range(0, len(points), size):
        indices = range(start, min(start + size, len(points)))
        finite = [index for index in indices if math.isfinite(points[index][1])]
        selected.update(index for index in indices if not math.isfinite(points[index][1]))
        if finite:
            selected.add(min(finite, key=lambda index: points[index][1]))
            selected.add(max(finite, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(selected)]


def _with_colours(chart: Chart) -> list[tuple[Series, int]]:
    return [
        (series, (index if series.colour is None else series.colour) % NUM_COLOURS)
        for index, series in enumerate(chart.series)
    ]


def _step_axis(chart: Chart) -> Axis:
    steps = [step for series in chart.series for step, _ in series.points]
    low, high = float(min(steps)), float(max(steps))
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Axis(low=low, high=high, start_px=MARGIN_LEFT, stop_px=WIDTH - MARGIN_RIGHT)


@dataclass(slots=True, kw_only=True, frozen=True)
class _DrawnLine:
    """A series in pixels."""

    colour: int
    style: LineStyle
    path: str
    """The `d` of the line's path."""
    non_finite_x: Sequence[str]
    """Horizontal positions of the values that are not finite."""
    dots: Sequence[tuple[str, str]]
    """Positions of the dots."""


def _draw_line(series: Series, colour: int, steps: Axis, values: Axis) -> _DrawnLine:
    points = downsample(series.points)
    pieces = []
    for is_shown, run in groupby(points, key=lambda point: _is_drawable(point[1], values)):
        if is_shown:
            pieces.append("M" + "L".join(" ".join(_place(point, steps, values)) for point in run))
    has_dots = series.line_style is LineStyle.dots or len(points) == 1
    return _DrawnLine(
        colour=colour,
        style=series.line_style,
        path="".join(pieces),
        non_finite_x=[
            _format_coordinate(steps.to_pixel(step))
            for step, value in points
            if not math.isfinite(value)
        ],
        dots=[
            _place(point, steps, values)
            for point in points
            if has_dots and _is_drawable(point[1], values)
        ],
    )


def _place(point: tuple[float, float], steps: Axis, values: Axis) -> tuple[str, str]:
    step, value = point
    return _format_coordinate(steps.to_pixel(step)), _format_coordinate(values.to_pixel(value))


def _is_drawable(value: float, values: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not values.is_log_scale)


@dataclass(slots=True, kw_only=True, frozen=True)
class _StackedArea:
    """A stacked area with tuples of step, lower and upper edge."""

    colour: int
    spans: Sequence[tuple[int, float, float]]


def _stack_areas(chart: Chart) -> Iterator[_StackedArea]:
    """Yield the areas from the bottom; missing and non-finite values count as 0."""
    steps = sorted({step for series in chart.series for step, _ in series.points})
    if len(steps) > MAX_POINTS:
        stride = math.ceil(len(steps) / MAX_POINTS)
        steps = [*steps[:-1:stride], steps[-1]]
    floor = dict.fromkeys(steps, 0.0)
    for series, colour in _with_colours(chart):
        value_by_step = dict(series.points)
        spans = []
        for step in steps:
            value = value_by_step.get(step, 0.0)
            top = floor[step] + (max(value, 0.0) if math.isfinite(value) else 0.0)
            spans.append((step, floor[step], top))
            floor[step] = top
        yield _StackedArea(colour=colour, spans=spans)


def _area_path(layer: _StackedArea, steps: Axis, values: Axis) -> str:
    spans = list(layer.spans)
    if len(spans) == 1:
        (step, low, high), half = spans[0], 0.3
        edges = [(step - half, low, high), (step + half, low, high)]
    else:
        edges = [(float(step), low, high) for step, low, high in spans]
    upper = [" ".join(_place((step, high), steps, values)) for step, _, high in edges]
    lower = [" ".join(_place((step, low), steps, values)) for step, low, _ in edges]
    return f"M{'L'.join([*upper, *lower[::-1]])}Z"


def _format_coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

"""Charts: places by hand, long series, values that are no numbers."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.report.page.svg_charts import (
    HEIGHT,
    MARGIN_BOTTOM,
    MARGIN_LEFT,
    MARGIN_RIGHT,
    MARGIN_TOP,
    MAX_POINTS,
    WIDTH,
    Chart,
    LineStyle,
    Series,
    chart_data,
    downsample,
    render_figure,
    render_svg,
)


def one(points, **options):
    return Chart(title="t", series=[Series(name="s", points=points)], **options)


def moves(markup, kind="line"):
    """Pieces of the paths of a class, each a list of (x, y)."""
    found = re.findall(rf'<path d="([^"]*)" class="{kind}[^"]*"', markup)
    pieces = [piece for path in found for piece in path.rstrip("Z").split("M") if piece]
    return [[tuple(map(float, spot.split())) for spot in one.split("L")] for one in pieces]


def test_a_line_goes_from_corner_to_corner():
    # The axis is [0, 1.05]: from 0 to 5 % above the largest value.
    ((first, last),) = moves(render_svg(one([(1, 0.0), (3, 1.0)])))
    assert first == (MARGIN_LEFT, HEIGHT - MARGIN_BOTTOM)
    top = HEIGHT - MARGIN_BOTTOM - (HEIGHT - MARGIN_BOTTOM - MARGIN_TOP) / 1.05
    assert last == pytest.approx((WIDTH - MARGIN_RIGHT, top), abs=0.06)


def test_a_logarithmic_axis_has_decades():
    drawn = render_svg(one([(0, 1e-6), (1, 1e-5), (2, 1e-4)], is_log_scale=True))
    spots = [y for _, y in moves(drawn)[0]]
    assert (spots[0], spots[2]) == (HEIGHT - MARGIN_BOTTOM, MARGIN_TOP)
    assert spots[1] == pytest.approx((spots[0] + spots[2]) / 2, abs=0.06)
    assert ">1e-6<" in drawn and ">1e-5<" in drawn


def test_zero_is_a_gap_on_a_logarithmic_axis():
    drawn = render_svg(one([(0, 1.0), (1, 1.0), (2, 0.0), (3, 1.0), (4, 1.0)], is_log_scale=True))
    assert [len(piece) for piece in moves(drawn)] == [2, 2]


def test_values_that_are_no_numbers_break_the_line_and_are_marked():
    drawn = render_svg(one([(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0), (5, 2.0)]))
    assert [len(piece) for piece in moves(drawn)] == [2, 2]
    assert drawn.count('class="broken"') == 2
    assert "nan" not in drawn
    assert render_svg(one([(0, math.nan)])).count('class="broken"') == 1


def test_a_single_step_is_a_dot():
    drawn = render_svg(one([(7, 3.0)]))
    (x,) = re.findall(r'<circle cx="([0-9.]+)"', drawn)
    assert float(x) == (MARGIN_LEFT + WIDTH - MARGIN_RIGHT) / 2


def test_areas_lie_on_top_of_each_other():
    series = [
        Series(name="low", points=[(0, 1.0), (1, 1.0)]),
        Series(name="high", points=[(0, 1.0), (1, math.nan)]),
    ]
    lower, upper = moves(render_svg(Chart(title="t", series=series, is_stacked=True)), "area")
    # The axis is [0, 2.1]; an area is its upper edge and back along its lower one.
    bottom, height = HEIGHT - MARGIN_BOTTOM, HEIGHT - MARGIN_BOTTOM - MARGIN_TOP
    y0, y1, y2 = (bottom - value / 2.1 * height for value in (0, 1, 2))
    assert [y for _, y in lower] == pytest.approx([y1, y1, y0, y0], abs=0.06)
    assert [y for _, y in upper] == pytest.approx([y2, y1, y1, y1], abs=0.06)


def test_no_point_is_refused():
    with pytest.raises(InputError) as caught:
        render_svg(one([]))
    assert caught.value.name == "points of chart 't'"


def test_a_short_series_is_kept_as_it_is():
    points = [(step, float(step)) for step in range(MAX_POINTS)]
    assert downsample(points) == points


@given(st.lists(st.floats(allow_nan=True), min_size=30, max_size=200))
def test_thinning_keeps_ends_extremes_and_what_is_not_finite(values):
    points = list(enumerate(values))
    kept = downsample(points, max_points=20)
    steps = [step for step, _ in kept]
    assert steps == sorted(set(steps)) and {0, len(points) - 1} <= set(steps)
    finite = [value for value in values if math.isfinite(value)]
    left = [value for _, value in kept if math.isfinite(value)]
    assert len(left) <= 22
    assert {step for step, value in points if not math.isfinite(value)} <= set(steps)
    if finite:
        assert (min(left), max(left)) == (min(finite), max(finite))


def test_the_data_of_a_chart_have_the_values_under_the_pointer():
    data = chart_data(one([(1, 0.123456789), (3, 1.0)], unit="s"))
    assert (data["low"], data["high"], data["unit"]) == (1, 3, "s")
    assert data["start"] == MARGIN_LEFT / WIDTH
    assert data["series"] == [{"name": "s", "colour": 0, "x": [1, 3], "y": [0.123457, 1.0]}]


def test_names_are_escaped_and_colours_go_round():
    series = [Series(name=f"<b>{i}", points=[(0, 1.0)]) for i in range(9)]
    drawn = render_figure(Chart(title="<i>", series=series, note="a < b"), "chart-0")
    assert "<b>0" not in drawn and "&lt;b&gt;8" in drawn and "&lt;i&gt;" in drawn
    assert drawn.count("swatch b0") == 2


def test_faint_lines_lie_behind():
    points = [(0, 1.0), (1, 2.0)]
    series = [
        Series(name="a", points=points),
        Series(name="b", points=points, line_style=LineStyle.faint, colour=0),
    ]
    drawn = render_svg(Chart(title="t", series=series))
    assert drawn.index("line faint s0") < drawn.index("line line s0")

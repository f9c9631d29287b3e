"""Axes, ticks and number formats, by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.report.page.axes import Axis, format_number, linear_ticks, make_value_axis


def test_a_linear_axis_places_values_in_proportion_and_within_its_ends():
    axis = Axis(low=10, high=20, start_px=100, stop_px=0)
    assert [axis.to_pixel(value) for value in (10, 15, 20, 25, 0)] == [100, 50, 0, 0, 100]
    assert axis.ticks(5) == [10, 12, 14, 16, 18, 20]


def test_a_logarithmic_axis_places_decades_at_equal_distances():
    axis = Axis(low=1e-4, high=1, start_px=0, stop_px=8, is_log_scale=True)
    assert [round(axis.to_pixel(value), 9) for value in (1e-4, 1e-2, 1, 0)] == [0, 4, 8, 0]
    assert axis.ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1])
    wide = Axis(low=1e-12, high=1, start_px=0, stop_px=1, is_log_scale=True)
    assert wide.ticks() == pytest.approx([1e-12, 1e-9, 1e-6, 1e-3, 1])


@pytest.mark.parametrize(("low", "high", "log"), [(1, 1, False), (0, 1, True), (2, 1, False)])
def test_an_axis_of_no_length_is_refused(low, high, log):
    with pytest.raises(InputError) as caught:
        Axis(low=low, high=high, start_px=0, stop_px=1, is_log_scale=log)
    assert (caught.value.got.low, caught.value.got.high) == (low, high)


def test_ticks_are_round_numbers():
    assert linear_ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert linear_ticks(0, 40, 7) == [0, 10, 20, 30, 40]
    assert linear_ticks(-0.3, 0.1, 4) == pytest.approx([-0.3, -0.2, -0.1, 0, 0.1])
    assert linear_ticks(1234, 1239, 5) == [1234, 1235, 1236, 1237, 1238, 1239]


finite = st.floats(-1e9, 1e9).map(lambda value: value if abs(value) > 1e-9 else 0.0)


@given(finite, st.floats(1e-6, 1e9), st.integers(2, 9))
def test_ticks_lie_inside_and_are_few(low, width, most):
    ticks = linear_ticks(low, low + width, most)
    room = 1e-6 * width + 1e-6 * abs(low)
    assert len(ticks) <= most + 2
    assert all(low - room <= tick <= low + width + room for tick in ticks)


def test_the_axis_of_values_has_room_and_includes_zero_if_asked_to():
    assert make_value_axis([2, 4], 10, 0, log=False, zero=True).low == 0
    assert make_value_axis([2, 4], 10, 0, log=False, zero=True).high == 4.2
    assert make_value_axis([2, 4], 10, 0, log=False, zero=False).low == 1.9
    assert make_value_axis([-1, 1], 10, 0, log=False, zero=True).low == -1.1
    flat = make_value_axis([3, 3], 10, 0, log=False, zero=False)
    assert flat.low < 3 < flat.high
    assert make_value_axis([], 10, 0, log=False, zero=True).high == 1


def test_the_logarithmic_axis_of_values_has_whole_decades():
    axis = make_value_axis([0.0, 3e-5, 2e-3], 10, 0, log=True, zero=True)
    assert (axis.low, axis.high) == pytest.approx((1e-5, 1e-2)) and axis.is_log_scale
    one = make_value_axis([1.0], 10, 0, log=True, zero=True)
    assert (one.low, one.high) == (1, 10)
    assert not make_value_axis([0.0, -1.0], 10, 0, log=True, zero=True).is_log_scale


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.62051, "0.6205"),
        (1506.404, "1506"),
        (12345, "12.35k"),
        (2.5e6, "2.5M"),
        (-3e9, "-3G"),
        (2.91e-7, "2.91e-7"),
        (2e-4, "2e-4"),
        (math.nan, "nan"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
    ],
)
def test_numbers_are_shown_in_a_few_digits(value, shown):
    assert format_number(value) == shown


EXTREMES = (1e308, -1e308, math.inf, -math.inf, math.nan, 1e-320, -1e-320, 0.0, 1.0)


@pytest.mark.parametrize("log", [False, True], ids=["linear", "logarithmic"])
@pytest.mark.parametrize("zero", [False, True], ids=["free", "from_zero"])
def test_every_double_has_an_axis_with_few_ticks_on_it(log, zero):
    for count in (1, 2):
        for values in itertools.product(EXTREMES, repeat=count):
            axis = make_value_axis(values, 200, 0, log=log, zero=zero)
            assert all(0 <= axis.to_pixel(value) <= 200 for value in values if value == value)
            ticks = axis.ticks()
            assert len(ticks) <= 8 and all(map(math.isfinite, ticks)), values
            assert all(format_number(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high"), [(-1e308, 1e307), (0, 1e-320), (-5e-324, 5e-324), (1, 1 + 2e-16), (0, 1e300)]
)
def test_ticks_of_extreme_ranges_are_few(low, high):
    assert len(linear_ticks(low, high)) <= 8

"""Chart axes: ticks, pixel positions and number formats.

Ticks are multiples of 1, 2 or 5 times a power of ten, or whole decades on a logarithmic axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

_TICK_MULTIPLES = (1.0, 2.0, 5.0, 10.0)
_MAX_DECADE_TICKS = 6
_MAX_SIZE, _MIN_SIZE = 1e300, 1e-300
"""Larger values are drawn at the end of the axis, and smaller ones on a logarithmic axis at its
beginning. Sums, squares of ticks and powers of ten of them are doubles."""
_MIN_STEP, _MIN_RELATIVE_STEP = 1e-300, 1e-15
"""Smallest distance of ticks, and the same as a share of their size: doubles tell them apart."""
_UNIT_SUFFIXES = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


@dataclass(slots=True, kw_only=True, frozen=True)
class Axis:
    """Maps values [low, high] to pixels [start_px, stop_px]."""

    low: float
    """Lowest value."""
    high: float
    """Highest value."""
    start_px: float
    """Pixel of `low`."""
    stop_px: float
    """Pixel of `high`."""
    is_log_scale: bool = False
    """Map the decimal logarithm of the values."""

    def __post_init__(self) -> None:
        is_finite = math.isfinite(self.high - self.low)
        if not (is_finite and self.low < self.high) or (self.is_log_scale and self.low <= 0):
            expected = "low < high, with a finite distance, and both above 0 on a logarithmic axis"
            raise InputError("Axis", self, expected)

    def to_pixel(self, value: float) -> float:
        """Return the pixel of a value, clamped to the ends of the axis."""
        clamped = min(max(value, self.low), self.high)
        if self.is_log_scale:
            low = math.log(self.low)
            fraction = (math.log(clamped) - low) / (math.log(self.high) - low)
        else:
            fraction = (clamped - self.low) / (self.high - self.low)
        return self.start_px + fraction * (self.stop_px - self.start_px)

    def ticks(self, max_ticks: int = 5) -> list[float]:
        """Return about `max_ticks` values to mark."""
        if not self.is_log_scale:
            return linear_ticks(self.low, self.high, max_ticks)
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        stride = max(1, math.ceil((last - first + 1) / _MAX_DECADE_TICKS))
        return [10.0**power for power in range(first, last + 1, stride)]


def linear_ticks(low: float, high: float, max_parts: int = 5) -> list[float]:
    """Return round values that divide [low, high] into at most `max_parts` parts."""
    raw = (high - low) / max(1, max_parts)
    if raw < max(_MIN_STEP, max(abs(low), abs(high)) * _MIN_RELATIVE_STEP):
        return [low, high]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in _TICK_MULTIPLES if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step + 0.0 for index in range(first, last + 1)]


def make_value_axis(
    values: Sequence[float], start: float, stop: float, *, log: bool, zero: bool
) -> Axis:
    """Return an axis that fits the finite values with a margin; [0, 1] without values.

    Args:
        values: values to show; a logarithmic axis ignores values up to 0.
        start: pixel of the lower end.
        stop: pixel of the upper end.
        log: use a logarithmic axis.
        zero: start at 0 if no value is negative.
    """
    finite = [min(max(value, -_MAX_SIZE), _MAX_SIZE) for value in values if math.isfinite(value)]
    shown = [max(value, _MIN_SIZE) for value in finite if value > 0] if log else finite
    if not shown:
        return Axis(low=0.0, high=1.0, start_px=start, stop_px=stop)
    low, high = min(shown), max(shown)
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return Axis(
            low=low,
            high=high if high > low else low * 10,
            start_px=start,
            stop_px=stop,
            is_log_scale=True,
        )
    if zero and low >= 0:
        low = 0.0
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(
        low=low if zero and low == 0 else low - margin,
        high=high + margin,
        start_px=start,
        stop_px=stop,
    )


def format_number(value: float) -> str:
    """Format a number with about four digits and `k`, `M`, `G` for large values."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    for limit, divisor, unit in _UNIT_SUFFIXES:
        if size >= limit:
            return f"{value / divisor:.4g}{unit}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"

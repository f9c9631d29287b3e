"""Axes: which values get a tick, where a value lies, and how numbers are written.

Ticks are multiples of 1, 2 or 5 times a power of ten; on a logarithmic axis whole decades.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEPS = (1.0, 2.0, 5.0, 10.0)
_MOST_DECADES = 6
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))


@dataclass(slots=True, kw_only=True, frozen=True)
class Axis:
    """Values [low, high] on pixels [start, stop]; `log`: by their decimal logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"Axis: got low={self.low}, high={self.high}, log={self.log}; expected low < high, "
                "and both above 0 on a logarithmic axis"
            )

    def at(self, value: float) -> float:
        """Pixel of a value; beyond the ends it is the end's."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Values to mark, about `most`."""
        if not self.log:
            return linear_ticks(self.low, self.high, most)
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        stride = max(1, math.ceil((last - first + 1) / _MOST_DECADES))
        return [10.0**power for power in range(first, last + 1, stride)]


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values in [low, high] that cut it into at most `most` parts."""
    raw = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(one * power for one in _STEPS if one * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step + 0.0 for index in range(first, last + 1)]


def value_axis(
    values: Sequence[float], start: float, stop: float, *, log: bool, zero: bool
) -> Axis:
    """The axis that shows these finite values with some room; without any it is [0, 1].

    zero: the axis begins at 0 where no value is below. A logarithmic axis shows what is above 0.
    """
    shown = [value for value in values if value > 0] if log else list(values)
    if not shown:
        return Axis(low=0.0, high=1.0, start=start, stop=stop)
    low, high = min(shown), max(shown)
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return Axis(
            low=low, high=high if high > low else low * 10, start=start, stop=stop, log=True
        )
    if zero and low >= 0:
        low = 0.0
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return Axis(
        low=low if zero and low == 0 else low - room, high=high + room, start=start, stop=stop
    )


def number(value: float) -> str:
    """A number as people read it: about four digits, `k`, `M`, `G` for large ones."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    for limit, divisor, unit in _UNITS:
        if size >= limit:
            return f"{value / divisor:.4g}{unit}"
    if size and size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"

r"""Reads answers that are one number, exactly, with a unit, a percent sign or a currency.

    1,000   1 000   -5.   .5   1e400   3.2*10^{5}   0.\overline{3}       decimals
    1/2   \frac{-1}{2}   3 1/2   3\frac{1}{2}                            fractions, mixed numbers
    5 million   50%   $5   5 km/h   12 square cm   90°                   scales, percent and units

Values are fractions, never floats. Work and memory are bounded: a decimal whose exponent is large
is kept as digits and exponent, and equals only the same digits with the same exponent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from mega_agentrl.reward.matching.notation import CURRENCY
from mega_agentrl.reward.matching.units import Unit, parse_unit

Number = Fraction | tuple[int, int]
"""An exact value: a fraction, or digits and the exponent of ten for very large or small ones."""

_MAX_EXPONENT = 2000
_MAX_EXPONENT_DIGITS = 18
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_PLAIN}(?:\.\d*)?|\.\d+)"
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_SCIENTIFIC = re.compile(rf"({_DECIMAL})\*10\^(?:\{{([+-]?\d+)\}}|(\d))|({_DECIMAL})[eE]([+-]?\d+)")
_FRACTION = re.compile(
    rf"(?:(\d+)(?: |(?=\\)))?(?:\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}"
    rf"|({_DECIMAL})/({_DECIMAL}))"
)
_NUMBER = re.compile(
    rf"(?:{_FRACTION.pattern}|{_REPEATING.pattern}|{_SCIENTIFIC.pattern}|{_DECIMAL})"
)
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
_SCALE = re.compile(rf" ?({'|'.join(_SCALES)})s?(?![a-zA-Z])", re.IGNORECASE)
_SIGNED = re.compile(rf"([+-]?)({CURRENCY}|€|£|¥|)([+-]?)(.*)", re.DOTALL)
_CURRENCY_UNITS = {CURRENCY: "dollar", "€": "euro", "£": "£", "¥": "¥"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number with what stands behind it."""

    value: Number
    unit: Unit = field(default_factory=Unit)
    is_percent: bool = False


@lru_cache(maxsize=4096)
def parse_quantity(text: str) -> Quantity | None:
    """Return the number that a normalized text is, None for any other text."""
    text = _unwrap(text)
    match = _SIGNED.fullmatch(text)
    if match is None or (match[1] and match[3]):
        return None
    body = match[4]
    number = _NUMBER.match(body)
    value = _parse_number(number[0]) if number else None
    if number is None or value is None:
        return None
    rest = body[number.end() :]
    if (scale := _SCALE.match(rest)) and isinstance(value, Fraction):
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
    if "-" in (match[1], match[3]):
        value = -value if isinstance(value, Fraction) else (-value[0], value[1])
    return _with_unit(value, match[2], rest)


def parse_number(text: str) -> Number | None:
    """Return the value of a normalized text that is a number without a unit, else None."""
    quantity = parse_quantity(text)
    is_bare = quantity is not None and not quantity.is_percent and quantity.unit == Unit()
    return quantity.value if quantity is not None and is_bare else None


def quantities_match(one: Quantity, other: Quantity) -> bool:
    """Return whether two numbers are equal.

    A unit may be missing in one of them. Two units must measure the same and are converted. A
    percentage equals the same number without a percent sign, and a hundredth of it.
    """
    if not isinstance(one.value, Fraction) or not isinstance(other.value, Fraction):
        return one == other
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        assert isinstance(percent.value, Fraction)
        values = (percent.value, percent.value / 100)
        return plain.unit == Unit() and plain.value in values
    if Unit() in (one.unit, other.unit):
        return one.value == other.value
    is_comparable = one.unit.dimensions == other.unit.dimensions
    return is_comparable and one.value * one.unit.factor == other.value * other.unit.factor


def _with_unit(value: Number, currency: str, rest: str) -> Quantity | None:
    if rest.strip().lower() in ("%", "percent", "per cent", "pct"):
        return None if currency else Quantity(value=value, is_percent=True)
    if rest and not isinstance(value, Fraction):
        return None
    if currency and rest.strip().lower() not in ("", "dollars", "usd"):
        return None
    unit = parse_unit(_CURRENCY_UNITS[currency] if currency else rest, has_space=rest[:1] == " ")
    return None if unit is None else Quantity(value=value, unit=unit)


def _unwrap(text: str) -> str:
    """Remove round brackets around the whole text."""
    match = re.fullmatch(r"\(([^(),;]*)\)", text)
    return match[1].strip() if match else text


def _parse_number(text: str) -> Number | None:
    if match := _REPEATING.fullmatch(text):
        return _repeating_decimal(*match.groups())
    if match := _SCIENTIFIC.fullmatch(text):
        mantissa, exponent = match[1] or match[4], match[2] or match[3] or match[5]
        return _shifted_decimal(mantissa, exponent)
    if match := _FRACTION.fullmatch(text):
        whole, top, bottom = match[1], match[2] or match[4], match[3] or match[5]
        dividend, divisor = _parse_decimal(top), _parse_decimal(bottom)
        is_proper = (top + bottom).isdigit() and 0 < dividend < divisor
        if whole and not is_proper:
            return None  # not a mixed number
        return int(whole or 0) + dividend / divisor if divisor else None
    return _parse_decimal(text)


def _parse_decimal(text: str) -> Fraction:
    """Return the value of a decimal that may have a sign and groups of three digits."""
    whole, _, digits = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int(f"{whole}{digits}"), 10 ** len(digits))


def _shifted_decimal(mantissa: str, exponent: str) -> Number | None:
    """Return mantissa * 10^exponent without computing a power that is large."""
    value = _parse_decimal(mantissa)
    if not value:
        return value
    if len(exponent.lstrip("+-")) > _MAX_EXPONENT_DIGITS:
        return None
    power = int(exponent)
    if abs(power) <= _MAX_EXPONENT:
        return value * Fraction(10) ** power
    digits = mantissa.replace(",", "").replace(" ", "")
    power -= len(digits.partition(".")[2])
    stripped = digits.replace(".", "").lstrip("0").rstrip("0")
    power += len(digits.replace(".", "")) - len(digits.replace(".", "").rstrip("0"))
    return int(stripped), power


def _repeating_decimal(whole: str, digits: str, period: str) -> Fraction:
    head = Fraction(int(f"{whole}{digits}" or 0), 10 ** len(digits))
    return head + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits))

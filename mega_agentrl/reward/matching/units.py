"""Units of measurement that an answer may name, with their exact sizes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

_NAMES: dict[str, tuple[str, str]] = {
    # name: dimension, size; sizes are decimals or fractions of the dimension's base unit
    "m meter metre": ("length", "1"),
    "mm millimeter millimetre": ("length", "0.001"),
    "cm centimeter centimetre": ("length", "0.01"),
    "dm decimeter decimetre": ("length", "0.1"),
    "km kilometer kilometre": ("length", "1000"),
    "in inch inche": ("length", "0.0254"),
    "ft foot feet": ("length", "0.3048"),
    "yd yard": ("length", "0.9144"),
    "mi mile": ("length", "1609.344"),
    "g gram": ("mass", "1"),
    "mg milligram": ("mass", "0.001"),
    "kg kilogram": ("mass", "1000"),
    "lb pound": ("mass", "453.59237"),
    "oz ounce": ("mass", "28.349523125"),
    "ton": ("ton", "1"),
    "s sec second": ("time", "1"),
    "ms millisecond": ("time", "0.001"),
    "min minute": ("time", "60"),
    "h hr hour": ("time", "3600"),
    "day": ("time", "86400"),
    "week": ("time", "604800"),
    "month": ("month", "1"),
    "yr year": ("month", "12"),
    "L l liter litre": ("volume", "1"),
    "mL ml milliliter millilitre": ("volume", "0.001"),
    "gallon gal": ("gallon", "1"),
    "dollar USD buck": ("dollar", "1"),
    "cent ¢": ("dollar", "0.01"),
    "euro EUR €": ("euro", "1"),
    "£ GBP": ("pound sterling", "1"),
    "¥ yen JPY yuan": ("yen", "1"),
    "rupee": ("rupee", "1"),
    "° degree deg": ("degree", "1"),
    "rad radian": ("radian", "1"),
    "°C °celsius": ("celsius", "1"),
    "°F °fahrenheit": ("fahrenheit", "1"),
    "K kelvin": ("kelvin", "1"),
    "Hz hertz": ("hertz", "1"),
    "N newton": ("newton", "1"),
    "J joule": ("joule", "1"),
    "kJ kilojoule": ("joule", "1000"),
    "W watt": ("watt", "1"),
    "kW kilowatt": ("watt", "1000"),
    "V volt": ("volt", "1"),
    "Pa pascal": ("pascal", "1"),
    "mol mole": ("mole", "1"),
    "unit": ("unit", "1"),
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_FACTOR = re.compile(r"([a-zA-Z°€£¥¢]+)(?:\^(?:([23])|\{(-?[123])\}))?")
_MAX_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A product of powers of units; without arguments no unit."""

    dimensions: frozenset[tuple[str, int]] = frozenset()
    """Pairs of a dimension and its exponent."""
    factor: Fraction = Fraction(1)
    """Size in the base units of the dimensions."""


def parse_unit(text: str, *, has_space: bool) -> Unit | None:
    """Return the unit that a text names, None if it is none.

    Args:
        text: what stands behind a number: `cm^2`, `square feet`, `miles per hour`, `m/s`, ``.
        has_space: whether a space separates it from the number. Without one a single letter is a
            variable, not a unit.
    """
    text = text.strip()
    if not text:
        return Unit()
    if len(text) > _MAX_CHARS or (len(text) == 1 and text.isascii() and not has_space):
        return None
    text = re.sub(r"\bmph\b", "mi/h", text.replace(" per ", "/").replace("degrees ", "°"))
    top, *bottom = text.split("/")
    exponents: Counter[str] = Counter()
    factor = Fraction(1)
    for sign, words in [(1, top), *((-1, part) for part in bottom)]:
        for name, power in _iter_factors(words):
            entry = _units().get(name) or _units().get(name.lower())
            if entry is None:
                return None
            exponents[entry[0]] += sign * power
            factor *= entry[1] ** (sign * power)
    return Unit(dimensions=frozenset(exponents.items()), factor=factor)


def _iter_factors(text: str) -> list[tuple[str, int]]:
    """Return names and exponents of `square cm`, `cm^2`, `N*m`; an empty name if it is neither."""
    factors, power = [], 1
    for word in re.split(r"[ *]", text):
        if word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        elif match := _FACTOR.fullmatch(word.rstrip(".")):
            factors.append((match[1], power * int(match[2] or match[3] or 1)))
            power = 1
        else:
            return [("", 1)]
    return factors or [("", 1)]


@cache
def _units() -> dict[str, tuple[str, Fraction]]:
    """Return dimension and size of each unit by its names, with plurals of the words."""
    units = {}
    for names, (dimension, size) in _NAMES.items():
        for name in names.split():
            units[name] = (dimension, Fraction(size))
            if len(name) > 2:
                units[f"{name}s"] = units[name]
    return units

r"""Compares two short answers as numbers, using math-verify.

Plain decimals are compared by value. Fractions, mixed numbers, percentages, roots, powers and
multiples of pi and of powers of ten, as text or LaTeX, go through math-verify: 1/2 matches
\frac{1}{2} and 0.5, and 50% matches 50 and 1/2. Six decimals count. Sums, tuples, dates and units
are not numbers here.

The policy controls the text. math-verify's own time limit needs signals in the main thread, so it
is off, and some texts would keep its parser busy for hours. Therefore only texts that match the
pattern below, without nesting or large exponents, are passed to it.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_MAX_CHARS = 80
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_ATOM = (
    rf"(?:{_DECIMAL}?\\sqrt\{{{_DECIMAL}\}}|{_DECIMAL}?\\pi|\d{{1,9}}\^(?:\d|\{{-?\d{{1,2}}\}})"
    rf"|{_DECIMAL})"
)
_FRACTION = rf"\\[dt]?frac(?:\{{-?{_ATOM}\}}\{{{_ATOM}\}}|\d\d)"
_SCIENTIFIC = rf"{_DECIMAL}(?:\\times|\\cdot|\*)10\^(?:\d|\{{-?\d{{1,2}}\}})"
_NUMBER = re.compile(rf"[+-]?(?:\d*{_FRACTION}|{_SCIENTIFIC}|{_ATOM}(?:/{_ATOM})?)%?", re.ASCII)
_PLAIN_DECIMAL = re.compile(
    r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE
)
_GROUPED_DECIMAL = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_SPACING = re.compile(
    r"\^(?:\\circ|\{\\circ\})|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,!;: ()\[\]]|\$"
)
_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}|\{([^{}]*)\}|\(([^()]*)\)")
_SPACED_DIGITS = re.compile(r"(?<=[\d.])\s+(?=[\d.])")
# It warns at the first call that there is no time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def numeric_answers_match(answer: str, truth: str) -> bool | None:
    """Return whether both are the same number, or None if one of them is not a single number."""
    plain, plain_truth = _strip_formatting(answer), _strip_formatting(truth)
    value, true_value = _parse_plain_decimal(plain), _parse_plain_decimal(plain_truth)
    if value is not None and true_value is not None:
        return f"{value + 0.0:.12g}" == f"{true_value + 0.0:.12g}"
    parsed, parsed_truth = _parse_math(plain), _parse_math(plain_truth)
    if not parsed or not parsed_truth:
        return None
    return bool(verify(list(parsed_truth), list(parsed), timeout_seconds=None))


def _strip_formatting(text: str) -> str:
    """Remove spacing, dollar signs, wrappers around the whole text, and a trailing full stop."""
    if len(text) > _MAX_CHARS or _SPACED_DIGITS.search(text.strip()):
        return ""
    text = text.replace("\\%", "%").replace("\\$", "").replace("{,}", ",")
    text = re.sub(r"\s+", "", _SPACING.sub("", text)).rstrip(".")
    while found := _WRAPPER.fullmatch(text):
        text = next(group for group in found.groups() if group is not None)
    return text


def _parse_plain_decimal(text: str) -> float | None:
    text = text.replace(",", "") if _GROUPED_DECIMAL.fullmatch(text) else text
    return float(text) if _PLAIN_DECIMAL.fullmatch(text) else None


@lru_cache(maxsize=4096)
def _parse_math(text: str) -> tuple[Any, ...]:
    """Return math-verify's parse of a number, () for any other text."""
    return tuple(parse(f"${text}$", parsing_timeout=None)) if _NUMBER.fullmatch(text) else ()

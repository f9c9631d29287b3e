"""Whether two short answers are the same number, whatever their dress; math-verify reads them.

Plain decimals are compared by their value. Fractions, mixed numbers, percentages, roots, powers,
multiples of pi and of powers of ten, as text or as LaTeX, go through math-verify: 1/2 is
\\frac{1}{2} and 0.5, 50% is 50 and 1/2. Six decimals count. What is more than one number (sums,
tuples, dates, units) is nobody's business here.

The policy writes what is read: math-verify's own time limit needs the main thread's signals, so it
is off, and some texts would keep its parser busy for hours. So only a text of the form below gets
there, which has no depth and no large exponent.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

_MOST_CHARACTERS = 80
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_ATOM = (
    rf"(?:{_DECIMAL}?\\sqrt\{{{_DECIMAL}\}}|{_DECIMAL}?\\pi|\d{{1,9}}\^(?:\d|\{{-?\d{{1,2}}\}})"
    rf"|{_DECIMAL})"
)
_FRACTION = rf"\\[dt]?frac(?:\{{-?{_ATOM}\}}\{{{_ATOM}\}}|\d\d)"
_TEN = rf"{_DECIMAL}(?:\\times|\\cdot|\*)10\^(?:\d|\{{-?\d{{1,2}}\}})"
_NUMBER = re.compile(rf"[+-]?(?:\d*{_FRACTION}|{_TEN}|{_ATOM}(?:/{_ATOM})?)%?", re.ASCII)
_PLAIN = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_SPACING = re.compile(
    r"\^(?:\\circ|\{\\circ\})|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,!;: ()\[\]]|\$"
)
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}|\{([^{}]*)\}|\(([^()]*)\)")
_APART = re.compile(r"(?<=[\d.])\s+(?=[\d.])")
# It says at the first call that there is no time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def same_number(answer: str, truth: str) -> bool | None:
    """None where one of the two is not one number."""
    bare, bare_truth = _bare(answer), _bare(truth)
    value, true_value = _decimal(bare), _decimal(bare_truth)
    if value is not None and true_value is not None:
        return f"{value + 0.0:.12g}" == f"{true_value + 0.0:.12g}"
    read, read_truth = _read(bare), _read(bare_truth)
    if not read or not read_truth:
        return None
    return bool(verify(list(read_truth), list(read), timeout_seconds=None))


def _bare(text: str) -> str:
    """The text without spacing, dollar signs, what wraps all of it, and a full stop at its end."""
    if len(text) > _MOST_CHARACTERS or _APART.search(text.strip()):
        return ""
    text = text.replace("\\%", "%").replace("\\$", "").replace("{,}", ",")
    text = re.sub(r"\s+", "", _SPACING.sub("", text)).rstrip(".")
    while found := _WRAPPED.fullmatch(text):
        text = next(group for group in found.groups() if group is not None)
    return text


def _decimal(text: str) -> float | None:
    text = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    return float(text) if _PLAIN.fullmatch(text) else None


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Any, ...]:
    """What math-verify makes of a number; nothing of any other text."""
    return tuple(parse(f"${text}$", parsing_timeout=None)) if _NUMBER.fullmatch(text) else ()

r"""Compares a short answer with its ground truths, by token F1 or as numbers.

`token_f1` is the F1 of ARPO, which is that of SQuAD: texts are lower-cased, ASCII punctuation and
articles are removed, and the tokens are compared as multisets. The maximum over the ground truths
counts; `yes`, `no` and `noanswer` must match exactly. Punctuation is removed from numbers, too, so
that -5 equals 5 and 3.14 equals 314.

    F1 = 2 P R / (P + R),  P = overlap / predicted tokens,  R = overlap / true tokens

`number_aware_f1` differs in that a word which is a number is compared by its value: -5 differs from
5; 1,000 equals 1000.0, and 0.5 equals 1/2. A leading `$` and a trailing `%` are ignored. There is
no algebra and there are no other units.

`numeric_answers_match` compares two answers that are single numbers. Plain decimals are compared by
value. Fractions, mixed numbers, percentages, roots, powers and multiples of pi and of powers of
ten, as text or LaTeX, go through math-verify: 1/2 matches \frac{1}{2} and 0.5, and 50% matches 50
and 1/2. math-verify compares six decimals. Sums, tuples, dates and units are not numbers here.

The policy controls the text, and some texts keep math-verify's parser busy for hours. The parser's
time limit needs signals in the main thread, so it is off; instead, only texts that match
`_SINGLE_NUMBER`, without nesting or large exponents, are passed to the parser.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from math_verify import parse, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_EXACT_MATCH_ANSWERS = ("yes", "no", "noanswer")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?")
_GROUPED_DECIMAL = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")

_MAX_CHARS = 80
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_ATOM = (
    rf"(?:{_DECIMAL}?\\sqrt\{{{_DECIMAL}\}}|{_DECIMAL}?\\pi|\d{{1,9}}\^(?:\d|\{{-?\d{{1,2}}\}})"
    rf"|{_DECIMAL})"
)
_FRACTION = rf"\\[dt]?frac(?:\{{-?{_ATOM}\}}\{{{_ATOM}\}}|\d\d)"
_SCIENTIFIC = rf"{_DECIMAL}(?:\\times|\\cdot|\*)10\^(?:\d|\{{-?\d{{1,2}}\}})"
_SINGLE_NUMBER = re.compile(
    rf"[+-]?(?:\d*{_FRACTION}|{_SCIENTIFIC}|{_ATOM}(?:/{_ATOM})?)%?", re.ASCII
)
_PLAIN_DECIMAL = re.compile(
    r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE
)
_ASCII_GROUPED_DECIMAL = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", re.ASCII)
_SPACING = re.compile(
    r"\^(?:\\circ|\{\\circ\})|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,!;: ()\[\]]|\$"
)
_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf)\{([^{}]*)\}|\{([^{}]*)\}|\(([^()]*)\)")
_SPACED_DIGITS = re.compile(r"(?<=[\d.])\s+(?=[\d.])")
# math_verify warns at the first call that there is no time limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def normalize_squad(text: str) -> str:
    """Normalise a text as SQuAD's evaluation does."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def token_f1(prediction: str, ground_truth: str | Sequence[str]) -> float:
    """Return the F1 of ARPO in [0, 1], 0 for an empty prediction or without ground truths.

    Args:
        prediction: the answer.
        ground_truth: the true answer, or several of which the best match counts.
    """
    return _max_f1(prediction, ground_truth, lambda text: normalize_squad(text).split())


def number_aware_f1(prediction: str, ground_truth: str | Sequence[str]) -> float:
    """Return the F1 in [0, 1] over words, where numbers are compared by value.

    Args:
        prediction: the answer.
        ground_truth: the true answer, or several of which the best match counts.
    """
    return _max_f1(prediction, ground_truth, _number_aware_tokens)


def parse_number(word: str) -> float | None:
    """Return the value of a number or fraction `a/b`, or None for any other word."""
    word = word.lower().strip("$").removesuffix("%")
    numerator, slash, denominator = word.partition("/")
    dividend = _parse_decimal(numerator)
    if not slash or dividend is None:
        return dividend
    divisor = _parse_decimal(denominator)
    return dividend / divisor if divisor else None


def _parse_decimal(word: str) -> float | None:
    if _GROUPED_DECIMAL.fullmatch(word):
        word = word.replace(",", "")
    return float(word) if _NUMBER.fullmatch(word) else None


def _number_aware_tokens(text: str) -> list[str]:
    words: list[str] = []
    for word in text.split():
        value = parse_number(word.rstrip(".,;:!?"))
        words += normalize_squad(word).split() if value is None else [f"{value + 0.0:.12g}"]
    return words


def _max_f1(
    prediction: str, ground_truth: str | Sequence[str], tokenize: Callable[[str], list[str]]
) -> float:
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    predicted_tokens = tokenize(prediction)
    return max((_f1(predicted_tokens, tokenize(truth)) for truth in truths), default=0.0)


def _f1(predicted_tokens: list[str], true_tokens: list[str]) -> float:
    prediction, truth = " ".join(predicted_tokens), " ".join(true_tokens)
    if prediction != truth and (
        prediction in _EXACT_MATCH_ANSWERS or truth in _EXACT_MATCH_ANSWERS
    ):
        return 0.0
    overlap = sum((Counter(predicted_tokens) & Counter(true_tokens)).values())
    if not overlap:
        return 0.0
    precision, recall = overlap / len(predicted_tokens), overlap / len(true_tokens)
    return 2 * precision * recall / (precision + recall)


def numeric_answers_match(answer: str, truth: str) -> bool | None:
    """Return whether both are the same number, or None if one of them is not a single number."""
    answer_text, truth_text = _strip_formatting(answer), _strip_formatting(truth)
    value, true_value = _parse_plain_decimal(answer_text), _parse_plain_decimal(truth_text)
    if value is not None and true_value is not None:
        return f"{value + 0.0:.12g}" == f"{true_value + 0.0:.12g}"
    answer_math, truth_math = _parse_math(answer_text), _parse_math(truth_text)
    if not answer_math or not truth_math:
        return None
    return bool(verify(list(truth_math), list(answer_math), timeout_seconds=None))


def _strip_formatting(text: str) -> str:
    """Remove spacing, dollar signs, brackets around the whole text, and a trailing full stop.

    The result is empty if the text cannot be a single number, because it is too long or has a space
    between digits.
    """
    if len(text) > _MAX_CHARS or _SPACED_DIGITS.search(text.strip()):
        return ""
    text = text.replace("\\%", "%").replace("\\$", "").replace("{,}", ",")
    text = re.sub(r"\s+", "", _SPACING.sub("", text)).rstrip(".")
    while wrapper := _WRAPPER.fullmatch(text):
        text = next(group for group in wrapper.groups() if group is not None)
    return text


def _parse_plain_decimal(text: str) -> float | None:
    text = text.replace(",", "") if _ASCII_GROUPED_DECIMAL.fullmatch(text) else text
    return float(text) if _PLAIN_DECIMAL.fullmatch(text) else None


@lru_cache(maxsize=4096)
def _parse_math(text: str) -> tuple[Any, ...]:
    """Return math-verify's parse of a single number, () for any other text."""
    return tuple(parse(f"${text}$", parsing_timeout=None)) if _SINGLE_NUMBER.fullmatch(text) else ()

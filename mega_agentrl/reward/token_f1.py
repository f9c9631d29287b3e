"""Token F1 of a short answer against its ground truths, in two variants.

`token_f1` is ARPO's (SQuAD's): lower-case, ASCII punctuation and articles removed, multiset
overlap, maximum over the ground truths; `yes`, `no` and `noanswer` must match exactly. Punctuation
is removed from numbers too, so that -5 equals 5 and 3.14 equals 314.

`number_aware_f1` differs in that a word which is a number counts by its value: -5 differs from 5;
1,000 equals 1000.0, and 0.5 equals 1/2. A leading `$` and a trailing `%` are ignored. There is no
algebra and there are no other units.

    F1 = 2 P R / (P + R),  P = overlap / predicted tokens,  R = overlap / true tokens
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_EXACT_MATCH_ANSWERS = ("yes", "no", "noanswer")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?")
_GROUPED_DECIMAL = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")


def normalize_squad(text: str) -> str:
    """Normalise a text as SQuAD's evaluation does."""
    words = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(words.split())


def token_f1(prediction: str, ground_truth: str | Sequence[str]) -> float:
    """Return ARPO's F1 in [0, 1]; 0 for an empty prediction or no ground truth."""
    return _max_f1(prediction, ground_truth, lambda text: normalize_squad(text).split())


def number_aware_f1(prediction: str, ground_truth: str | Sequence[str]) -> float:
    """Return the F1 in [0, 1] over words, where numbers count by their values."""
    return _max_f1(prediction, ground_truth, _number_aware_tokens)


def parse_number(word: str) -> float | None:
    """Return the value of a word or fraction `a/b`, or None if it is no number."""
    word = word.lower().strip("$").removesuffix("%")
    numerator, slash, denominator = word.partition("/")
    top = _parse_decimal(numerator)
    if not slash or top is None:
        return top
    bottom = _parse_decimal(denominator)
    return top / bottom if bottom else None


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
    prediction: str, ground_truth: str | Sequence[str], words: Callable[[str], list[str]]
) -> float:
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    predicted = words(prediction)
    return max((_f1(predicted, words(truth)) for truth in truths), default=0.0)


def _f1(predicted: list[str], true: list[str]) -> float:
    whole, whole_true = " ".join(predicted), " ".join(true)
    if whole != whole_true and (
        whole in _EXACT_MATCH_ANSWERS or whole_true in _EXACT_MATCH_ANSWERS
    ):
        return 0.0
    overlap = sum((Counter(predicted) & Counter(true)).values())
    if not overlap:
        return 0.0
    precision, recall = overlap / len(predicted), overlap / len(true)
    return 2 * precision * recall / (precision + recall)

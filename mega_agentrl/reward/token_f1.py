"""Token F1 of a short answer against its ground truths, in two readings.

`token_f1` is the one ARPO releases (SQuAD's): lower-case, ASCII punctuation dropped without
leaving a space, articles dropped, multiset overlap, best over the ground truths; `yes`, `no`
and `noanswer` must match exactly. Punctuation goes from numbers too, so that -5 equals 5 and
3.14 equals 314.

`number_aware_f1` is the same except that a word which is a number counts as its value: -5
differs from 5, 1,000 and 1000.0 are equal, as are 0.5 and 1/2. No algebra, no units beyond a
leading `$` and a trailing `%`, which are ignored.

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
_CLOSED = ("yes", "no", "noanswer")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,3})?")
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")


def normalize(text: str) -> str:
    """The released normalisation."""
    bare = _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))
    return " ".join(bare.split())


def token_f1(prediction: str, ground_truth: str | Sequence[str]) -> float:
    """The released F1 in [0, 1]; 0 for an empty prediction or no ground truth."""
    return _best(prediction, ground_truth, lambda text: normalize(text).split())


def number_aware_f1(prediction: str, ground_truth: str | Sequence[str]) -> float:
    """F1 over words of which numbers count as their values."""
    return _best(prediction, ground_truth, _words)


def parse_number(word: str) -> float | None:
    """Value of one word, None where it is no number; `a/b` is a fraction."""
    word = word.lower().strip("$").removesuffix("%")
    numerator, slash, denominator = word.partition("/")
    top = _parse_decimal(numerator)
    if not slash or top is None:
        return top
    bottom = _parse_decimal(denominator)
    return top / bottom if bottom else None


def _parse_decimal(word: str) -> float | None:
    if _GROUPED.fullmatch(word):
        word = word.replace(",", "")
    return float(word) if _NUMBER.fullmatch(word) else None


def _words(text: str) -> list[str]:
    words: list[str] = []
    for word in text.split():
        value = parse_number(word.rstrip(".,;:!?"))
        words += normalize(word).split() if value is None else [f"{value + 0.0:.12g}"]
    return words


def _best(
    prediction: str, ground_truth: str | Sequence[str], words: Callable[[str], list[str]]
) -> float:
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    predicted = words(prediction)
    return max((_f1(predicted, words(truth)) for truth in truths), default=0.0)


def _f1(predicted: list[str], true: list[str]) -> float:
    whole, whole_true = " ".join(predicted), " ".join(true)
    if whole != whole_true and (whole in _CLOSED or whole_true in _CLOSED):
        return 0.0
    overlap = sum((Counter(predicted) & Counter(true)).values())
    if not overlap:
        return 0.0
    precision, recall = overlap / len(predicted), overlap / len(true)
    return 2 * precision * recall / (precision + recall)

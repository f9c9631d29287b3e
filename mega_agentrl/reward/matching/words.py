"""Compares answers in words: the F1 of SQuAD, as ARPO released it, and one with exact numbers.

    F1 = 2 P R / (P + R),  P = overlap / predicted tokens,  R = overlap / true tokens

`token_f1` lower-cases, and removes ASCII punctuation and articles, also from numbers: -5 equals 5,
and 3.14 equals 314. `number_aware_f1` compares numbers by value, and keeps signs, operators and
separators inside a word: 12:30 differs from 1230. In both, `yes`, `no` and `noanswer` must match
exactly.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.reward.matching.notation import CURRENCY, MAX_CHARS
from mega_agentrl.reward.matching.numbers import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_EXACT_MATCH_ANSWERS = ("yes", "no", "noanswer")
_MEANINGFUL = re.compile(r"(?<=\w)[^\w\s.'\u2019\"]+(?=\w)|^[-+](?=\w)|(?<=[\d)])!")
_LETTERS = re.compile(r"\\(?:begin|end)\{\w+\}|\\[a-zA-Z]+|[^\W\d_]+")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi max min gcd "
    "lcm mod or and theta alpha beta phi lambda".split()
)


def has_words(text: str) -> bool:
    """Return whether a normalized text contains a word that is no function of mathematics.

    Two letters in a row are a product where the text also has digits or operators; letters with
    spaces between them are words.
    """
    runs = [run for run in _LETTERS.findall(text) if run[0] != "\\" and run not in _FUNCTIONS]
    longest = max(map(len, runs), default=0)
    is_only_letters = not re.search(r"[\d+*/^=<>()|\\]", text)
    return longest >= 3 or (is_only_letters and (longest == 2 or " " in text))


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
    return _max_f1(prediction, ground_truth, number_aware_tokens)


def number_aware_tokens(text: str) -> list[str]:
    """Return the words of a text, with one spelling for each number."""
    return [token for word in text.split() for token in _word_tokens(word)]


def _word_tokens(word: str) -> list[str]:
    stripped = word.rstrip(".,;:?").strip("$")
    if len(stripped) <= MAX_CHARS and any(char.isdigit() for char in stripped):
        quantity = parse_quantity(stripped.removesuffix("%").lstrip(CURRENCY))
        if quantity is not None:
            return [f"{quantity.value} {sorted(quantity.unit.dimensions)} {quantity.unit.factor}"]
    if _MEANINGFUL.search(stripped):
        return [stripped.lower().strip("\"'`()[]{}")]
    return normalize_squad(word).split()


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

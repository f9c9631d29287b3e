"""F1 over words: as released, and with numbers, signs and separators that mean something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.matching.words import (
    has_words,
    normalize_squad,
    number_aware_f1,
    token_f1,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "arpo_reward.json"
ROWS = json.loads(GOLDEN.read_text(encoding="utf-8"))["f1"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["prediction"])
def test_f1_and_normalization_are_those_of_the_released_code(row):
    assert token_f1(row["prediction"], row["ground_truths"]) == pytest.approx(row["f1"], abs=1e-12)
    assert normalize_squad(row["prediction"]) == row["norm_pred"]


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("-5", "5", 0.0),
        ("3.14", "314", 0.0),
        ("1,000", "1000", 1.0),
        ("42.", "42", 1.0),
        ("$42$", "42", 1.0),
        ("42%", "42", 1.0),
        ("x 42", "42", 2 / 3),
        ("The U.S.A.", "usa", 1.0),
        ("Barack Hussein Obama", "Barack Obama", 0.8),
        ("yes it is", "yes", 0.0),
        ("", "42", 0.0),
        ("1/0", "10", 0.0),
        ("at 12:30", "at 1230", 0.5),
        ("a function f(x)", "a function fx", 0.5),
        ("Paris, France", "Paris France", 1.0),
        ("1e999999999 apples", "1e999999998 apples", 0.5),
    ],
)
def test_numbers_match_by_value_and_separators_stay(prediction, truth, expected):
    assert number_aware_f1(prediction, truth) == pytest.approx(expected, abs=1e-12)


def test_the_best_of_several_truths_counts_and_none_is_zero():
    assert number_aware_f1("NYC", ["New York City", "NYC"]) == 1.0
    assert number_aware_f1("NYC", []) == 0.0


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_integers_match_only_if_they_are_equal(first, second):
    assert (number_aware_f1(str(first), f"{second:,}") == 1.0) == (first == second)


@given(st.text(max_size=40), st.lists(st.text(max_size=40), max_size=3))
def test_f1_of_any_text_is_in_range(prediction, truths):
    assert 0.0 <= token_f1(prediction, truths) <= 1.0
    assert 0.0 <= number_aware_f1(prediction, truths) <= 1.0


def test_words_differ_from_expressions():
    assert all(map(has_words, ("Paris", "yes", "a b", "12 apples", "New York")))
    assert not any(map(has_words, ("x+1", "2ab", r"\sin x", "A", "12", "sin(x)", r"\alpha+1")))

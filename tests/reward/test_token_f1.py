"""Token F1: the released numbers, and numbers that count as numbers."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.token_f1 import normalize_squad, number_aware_f1, parse_number, token_f1

GOLDEN = Path(__file__).parents[1] / "golden" / "arpo_reward.json"
ROWS = json.loads(GOLDEN.read_text(encoding="utf-8"))["f1"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["prediction"])
def test_released_rows(row):
    assert token_f1(row["prediction"], row["ground_truths"]) == pytest.approx(row["f1"], abs=1e-12)
    assert normalize_squad(row["prediction"]) == row["norm_pred"]


@pytest.mark.parametrize(
    ("prediction", "truth", "expected"),
    [
        ("-5", "5", 0.0),
        ("3.14", "314", 0.0),
        ("1,000", "1000", 1.0),
        ("42.0", "42", 1.0),
        ("0.5", "1/2", 1.0),
        ("42.", "42", 1.0),
        ("$42$", "42", 1.0),
        ("42%", "42", 1.0),
        ("42", "43", 0.0),
        ("x 42", "42", 2 / 3),
        ("The U.S.A.", "usa", 1.0),
        ("Barack Hussein Obama", "Barack Obama", 0.8),
        ("yes it is", "yes", 0.0),
        ("", "42", 0.0),
        ("1/0", "10", 1.0),  # no number: punctuation is dropped as released
    ],
)
def test_numbers_are_values(prediction, truth, expected):
    assert number_aware_f1(prediction, truth) == pytest.approx(expected, abs=1e-12)


def test_best_of_several_truths_and_none():
    assert number_aware_f1("NYC", ["New York City", "NYC"]) == 1.0
    assert number_aware_f1("NYC", []) == 0.0


def test_parse_number():
    assert parse_number("-1.5e3") == -1500.0
    assert parse_number("1,234.5") == 1234.5
    assert parse_number("12,34") is None
    assert parse_number("1/0") is None
    assert parse_number("abc") is None


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_equal_exactly_where_the_integers_are(first, second):
    assert (number_aware_f1(str(first), f"{second:,}") == 1.0) == (
        f"{first:.12g}" == f"{second:.12g}"
    )


@given(st.text(max_size=40), st.lists(st.text(max_size=40), max_size=3))
def test_never_raises_and_stays_in_range(prediction, truths):
    assert 0.0 <= token_f1(prediction, truths) <= 1.0
    assert 0.0 <= number_aware_f1(prediction, truths) <= 1.0

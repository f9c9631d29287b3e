"""Token F1 as released and with numbers by value; answers that are single numbers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.answer_match import (
    normalize_squad,
    number_aware_f1,
    numeric_answers_match,
    parse_number,
    token_f1,
)

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
def test_integers_match_if_12_digits_are_equal(first, second):
    are_equal = f"{first:.12g}" == f"{second:.12g}"
    assert (number_aware_f1(str(first), f"{second:,}") == 1.0) == are_equal


@given(st.text(max_size=40), st.lists(st.text(max_size=40), max_size=3))
def test_f1_of_any_text_is_in_range(prediction, truths):
    assert 0.0 <= token_f1(prediction, truths) <= 1.0
    assert 0.0 <= number_aware_f1(prediction, truths) <= 1.0


SAME = [
    ("1,000", "1000.0"),
    ("0.5", "1/2"),
    ("\\frac{1}{2}", "0.5"),
    ("\\dfrac12", "1/2"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("\\left(\\frac{2}{4}\\right)", "$0.5$"),
    ("3\\frac{1}{2}", "3.5"),
    ("50%", "0.5"),
    ("50\\%", "50"),
    ("\\$1,000.50", "1000.5"),
    ("1e3", "1000"),
    ("3.2\\times 10^{5}", "320000"),
    ("2^{10}", "1024"),
    ("\\sqrt{16}", "4"),
    ("\\frac{\\sqrt{3}}{2}", "0.866025404"),
    ("2\\pi", "6.283185"),
    ("\\text{12}", " 12. "),
    ("12^\\circ", "12"),
    ("-0", "0"),
    ("1/3", "0.333333"),
]
OTHER = [
    ("-5", "5"),
    ("3.14", "314"),
    ("1/3", "0.33"),
    ("\\frac{1}{2}", "\\frac{1}{3}"),
    ("5%", "50"),
    ("1/0", "5"),
    ("9^{-99}", "0"),
    ("999999999^{99}/999999998^{99}", "1/2"),
]
NO_NUMBER = [
    ("", "1"),
    ("12 apples", "12"),
    ("Paris", "Paris"),
    ("7 8 9", "9"),
    ("1,2", "12"),
    ("(1,2)", "1,2"),
    ("2024-05-03", "2016"),
    ("1-1/2", "0.5"),
    ("x+1", "1+x"),
    ("5", "five"),
    ("\u0663", "3"),
]
SLOW = [
    "9**9**9**9",
    "9^99^99",
    "((9^{99})^{99})^{99}",
    "1/9" * 26,
    "(" * 39 + "1" + ")" * 39,
    "\\frac{" * 12 + "1",
    "2^{100000000}",
    "99999!",
    "{" * 80,
    "9" * 100_000,
    "\\sqrt{" + "7" * 70 + "}",
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_number(one, other):
    assert numeric_answers_match(one, other) is True
    assert numeric_answers_match(other, one) is True


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_another_number(one, other):
    assert numeric_answers_match(one, other) is False
    assert numeric_answers_match(other, one) is False


@pytest.mark.parametrize(("one", "other"), NO_NUMBER)
def test_no_number(one, other):
    assert numeric_answers_match(one, other) is None


@pytest.mark.parametrize("text", SLOW)
def test_expressions_that_would_take_long_are_refused(text):
    start_s = time.process_time()
    assert not numeric_answers_match(text, "1/2")
    assert time.process_time() - start_s < 10


@given(st.text(alphabet="0123456789.,/%$-^{}()\\frac sqrtpi", max_size=40))
def test_any_text_is_compared_without_an_error(text):
    assert numeric_answers_match(text, "\\frac{1}{2}") in (None, True, False)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_a_fraction_is_its_latex(top, bottom):
    sign, size = ("-", -top) if top < 0 else ("", top)
    for change in (0, 1):
        latex = f"{sign}\\frac{{{size + change}}}{{{bottom}}}"
        assert numeric_answers_match(f"{top}/{bottom}", latex) is (change == 0)

"""Numbers in any dress, and texts that are none or would keep a parser busy."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.numeric_match import numeric_answers_match

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
def test_what_would_take_long_never_gets_to_the_parser(text):
    start_s = time.process_time()
    assert not numeric_answers_match(text, "1/2")
    assert time.process_time() - start_s < 10


@given(st.text(alphabet="0123456789.,/%$-^{}()\\frac sqrtpi", max_size=40))
def test_nothing_raises_and_everything_ends(text):
    assert numeric_answers_match(text, "\\frac{1}{2}") in (None, True, False)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_a_fraction_is_its_latex(top, bottom):
    sign, size = ("-", -top) if top < 0 else ("", top)
    assert numeric_answers_match(f"{top}/{bottom}", f"{sign}\\frac{{{size}}}{{{bottom}}}") is True
    assert (
        numeric_answers_match(f"{top}/{bottom}", f"{sign}\\frac{{{size + 1}}}{{{bottom}}}") is False
    )

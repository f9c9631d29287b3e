"""The matcher against its table, and its bounds."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.matching.matcher import grade_answer, match_answers
from mega_agentrl.reward.matching.symbolic import expressions_equal
from tests.reward.matching.answer_table import DIFFERENT, EQUAL, TABLE, UNRECOGNIZED, markdown

PAGE = Path(__file__).parents[3] / "docs" / "own_reward.md"


def is_accepted(answer, truth):
    """The verdict with expressions compared in this process."""
    return match_answers(answer, truth, expressions_equal) is True


def no_expressions(one, other):
    """Stands for the child where a pair must be decided without it."""
    raise AssertionError(f"{one} and {other} were compared as expressions")


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.title)
def test_equal_answers_are_accepted_and_no_others(kind):
    for one, other in kind.equal:
        assert is_accepted(one, other) and is_accepted(other, one), (one, other)
    for one, other in (*kind.different, *kind.unrecognized):
        assert not is_accepted(one, other) and not is_accepted(other, one), (one, other)


def test_the_table_is_large_and_almost_all_of_it_is_recognized():
    assert len({*EQUAL, *DIFFERENT, *UNRECOGNIZED}) == len(EQUAL + DIFFERENT + UNRECOGNIZED) >= 172
    assert len(UNRECOGNIZED) <= 12


def test_the_page_shows_the_table():
    assert markdown() in PAGE.read_text(encoding="utf-8"), (
        "docs/own_reward.md is not current: python -m tests.reward.matching.answer_table"
    )


@pytest.mark.parametrize(
    "text",
    [
        "9" * 1_000_000,
        "1e" + "9" * 1000,
        "1e400",
        "1e999999999999999999",
        "(" * 2000,
        "(" * 900 + "1" + ")" * 900,
        "{" * 1000 + "}" * 1000,
        "1/" * 900 + "1",
        ",".join("1" * 900),
        "\\{" + ",".join(map(str, range(450))) + "\\}",
        "\\text{" * 300 + "}" * 300,
        "\\frac" * 400,
        "x=" * 900 + "1",
        "\\pm" * 600,
        "<" * 2000,
        " or ".join("1" * 400),
        "\\cup".join(["(0,1)"] * 180),
        "1 " * 1000,
        "$" * 2000,
    ],
    ids=lambda text: text[:12],
)
def test_hostile_texts_cost_almost_nothing(text):
    start_s = time.process_time()
    for truth in ("1", "(1,2)", "\\{1,2\\}", "x<1", "1e401"):
        assert match_answers(text, truth, no_expressions) is not True
    assert time.process_time() - start_s < 1


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "9^99^99", "((9^{99})^{99})^{99}", "2^{100000000}", "99999!", "5!!", "(9!)!",
     "\\sqrt{" + "7" * 70 + "}", "2^{2^{2^{9}}}", "x" * 199 + "+1", "e^{e^{e^9}}"],
)  # fmt: skip
def test_costly_expressions_are_never_evaluated(text):
    assert match_answers(text, "x+1", no_expressions) is not True


@given(st.text(alphabet="0123456789.,/%$-^{}()[]\\frac sqrtpix=<>|!_°&", max_size=40))
def test_any_text_is_compared_without_an_error(text):
    for truth in ("\\frac{1}{2}", "(1,2)", "x<2", "Paris"):
        match_answers(text, truth, lambda one, other: False)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4))
def test_a_fraction_is_its_latex(top, bottom):
    sign, size = ("-", -top) if top < 0 else ("", top)
    for change in (0, 1):
        latex = f"{sign}\\frac{{{size + change}}}{{{bottom}}}"
        is_equal = match_answers(f"{top}/{bottom}", latex, no_expressions)
        assert is_equal is (change == 0)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=8), st.integers(-9, 9))
def test_decimals_are_compared_exactly(number, change):
    other = number + change
    assert match_answers(f"{number:f}", f"{other:f}", no_expressions) is (change == 0)


def test_grades_without_expressions_are_known_at_once():
    def compare_words(answer, truth):
        return 0.25

    assert grade_answer("1/2", ["7", "0.5"], compare_words) == 1.0
    assert grade_answer("A", ["B"], compare_words) == 0.0
    assert grade_answer("big Ben", ["London", "7"], compare_words) == 0.25


def test_an_expression_is_a_future_of_the_child():
    grade = grade_answer("x+1", ["x+2", "1+x"], lambda answer, truth: 0.0)
    assert isinstance(grade, Future)
    wrong = grade_answer("(x+1, 2)", ["(x+2, 2)"], lambda answer, truth: 0.0)
    assert (grade.result(300), wrong.result(300)) == (1.0, 0.0)
    assert grade_answer("(x+1, 2)", ["(x+2, 3)"], lambda answer, truth: 0.0) == 0.0

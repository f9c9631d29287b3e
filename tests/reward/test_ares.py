"""ARES's accuracy: which answers are the same, and when an answer is graded again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.ares import accuracy, answers_match, final_answer


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("42", "42"),
        ("1,000", "1000.0"),
        ("0.5", "\\frac{1}{2}"),
        ("-\\dfrac{3}{4}", "-0.75"),
        ("\\frac12", "0.5"),
        ("50\\%", "50"),
        ("\\$5", "5"),
        ("90^\\circ", "90"),
        ("\\text{Paris}", "paris"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\( x + 1 \\)", "x+1"),
        ("B.", "b"),
        ("\\frac{x}{2}", "\\frac{ x }{ 2 }"),
        ("{7}", "7"),
        ("12\\,000", "12000"),
    ],
)
def test_equal_answers(answer, truth):
    assert answers_match(answer, truth) and answers_match(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "-5"),
        ("3.14", "314"),
        ("42", "42.1"),
        ("", "0"),
        ("x", ""),
        ("A", "B"),
        ("x+1", "1+x"),
        ("1e999", "1e998"),
        ("\\frac{x}{2}", "x"),
    ],
)
def test_different_answers(answer, truth):
    assert not answers_match(answer, truth)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>a</think>so \\boxed{4}", "4"),
        ("\\boxed{1} then \\boxed {\\frac{1}{2}} end", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{a \\boxed{b} c}", "b"),
        ("<think>5</think>  six ", "six"),
        ("}} \\boxed{3}", "3"),
        ("seven", "seven"),
        ("", ""),
    ],
)
def test_final_answer(response, answer):
    assert final_answer(response) == answer


def test_accuracy():
    right = accuracy("\\boxed{0.5}", ["2", "\\frac{1}{2}"])
    assert (right.value, right.correct, right.f1, right.answer) == (1.0, True, 1.0, "0.5")
    wrong = accuracy("\\boxed{3}", "2")
    assert (wrong.value, wrong.correct) == (0.0, False)


@given(st.text(alphabet="\\boxed{}frac12 $.,", max_size=60), st.text(max_size=10))
def test_any_text_has_a_reward(response, truth):
    assert accuracy(response, truth).value in (0.0, 1.0)


def test_hostile_text_ends_soon():
    accuracy("\\boxed{" * 20_000, "1")
    accuracy("{" * 200_000, "1")

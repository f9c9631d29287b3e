"""The part `accuracy`: where the answer of a response stands, and its score."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.ares import accuracy, final_answer


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
        ("\\boxed{1} then \\boxed{}", ""),
        ("\\fbox{4}", "4"),
        ("steps\nAnswer: 34", "34"),
        ("steps\nAnswer: $34$<|im_end|>", "$34$"),
        ("Answer: \\boxed{34}", "34"),
        ("**Answer:** 34\n", "34"),
        ("**Final answer: 34**", "34"),
        ("Answer:\n34", "34"),
        ("So the answer is 3.5.", "3.5."),
        ("x = 3\n#### 1,234", "1,234"),
        ("\\boxed{12} is a guess\nAnswer: 34", "34"),
        ("Answer: 3\nno: \\boxed{4}", "4"),
        ("<think>\nAnswer: 3</think>so 4", "so 4"),
        ("<think>\\boxed{3}</think>\nAnswer: 4", "4"),
        ("Answer: 3\nor is it?", "Answer: 3\nor is it?"),
        ("the answer isn't 5", "the answer isn't 5"),
    ],
)
def test_the_final_answer_is_in_the_last_box_or_behind_a_marker(response, answer):
    assert final_answer(response) == answer


def test_accuracy_is_one_for_an_equal_answer_and_zero_otherwise():
    right = accuracy("\\boxed{0.5}", ["2", "\\frac{1}{2}"])
    assert (right.value, right.correct, right.f1, right.answer) == (1.0, True, 1.0, "0.5")
    wrong = accuracy("\\boxed{3}", ["2"])
    assert (wrong.value, wrong.correct) == (0.0, False)


def test_expressions_are_compared_by_the_child():
    score = accuracy("Answer: $(x+1)^2$", ["x^2+2x+1"]).result(300)
    assert (score.value, score.correct, score.answer) == (1.0, True, "$(x+1)^2$")


@given(st.text(alphabet="\\boxed{}frac12 $.,Answer:\n", max_size=60))
def test_any_text_has_a_reward(response):
    assert accuracy(response, ["Paris"]).value in (0.0, 1.0)


def test_hostile_text_ends_soon():
    for text in (
        "\\boxed{" * 20_000,
        "{" * 200_000,
        "Answer: " * 50_000,
        "*" * 200_000,
        "#" * 200_000,
    ):
        accuracy(text, ["1"])

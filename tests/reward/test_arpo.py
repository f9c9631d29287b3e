"""ARPO's reward: every released row, and what the strict rule reads differently."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.reward.arpo import score, score_trajectory
from mega_agentrl.types.records import Role, ToolStatus, Turn
from tests.fakes import OUTCOME, make_prompt, make_trajectory

GOLDEN = Path(__file__).parents[1] / "golden" / "arpo_reward.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
THINK = "<think> r </think>"
ANSWER = "<answer> \\boxed{12} </answer>"


def trajectory(*turns, truth="12"):
    """Turns are model text, or (tool, status, answer) for a tool's turn."""
    records = []
    for index, turn in enumerate(turns):
        if isinstance(turn, str):
            role, text, outcome = Role.assistant, turn, None
        else:
            tool, status, answer = turn
            role, text = Role.tool, f" <result>\n{answer}\n</result>"
            outcome = replace(OUTCOME, tool=tool, status=status, answer=answer)
        records.append(Turn(index=index, role=role, start=0, stop=0, text=text, outcome=outcome))
    return make_trajectory(prompt=make_prompt(ground_truth=truth), turns=records)


SEARCH = (THINK + "<search> q </search>", ("search", ToolStatus.ok, "x"))
PYTHON = (THINK + "<python> 1 </python>", ("python", ToolStatus.ok, "1"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_scores_are_those_of_the_released_code(case):
    got = score(case["solution"], case["ground_truth"])
    assert got.value == pytest.approx(case["score"], abs=1e-12)
    assert got.f1 == pytest.approx(case["f1"], abs=1e-12)
    assert got.answer == case["answer"]
    assert got.correct == (case["f1"] == 1.0)
    if not case["reason"].startswith("find box error"):  # a Python error's text there
        assert got.reason == case["reason"]


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("\\frac{1}{2}", "0.5", 1.0),
        ("-5", "5", 0.0),
        ("0.5", ("2", "\\frac12"), 1.0),
        ("12 apples", "12", 2 / 3),
        ("Paris", "paris", 1.0),
    ],
)
def test_strict_compares_numbers_as_numbers(answer, truth, expected):
    text = f"{THINK}<answer> \\boxed{{{answer}}} </answer>"
    assert score_trajectory(trajectory(text, truth=truth)).f1 == pytest.approx(expected)


def test_a_turn_of_a_user_is_no_result_of_a_tool():
    good = THINK + "<answer> \\boxed{4} </answer>"
    one = trajectory(*PYTHON, good, truth="4")
    assert score_trajectory(one).value == 1.0
    one.turns[1] = replace(one.turns[1], role=Role.user)
    assert score_trajectory(one).value == -1.0


def test_threshold_makes_a_partial_answer_correct():
    text = THINK + "<answer> \\boxed{Barack Hussein Obama} </answer>"
    assert not score(text, "Barack Obama").correct
    assert score(text, "Barack Obama", 0.8).correct
    assert not score(THINK + "<answer> \\boxed{x} </answer>", "y", 0.0).correct


def test_last_box_by_a_space_ends_at_a_dollar():
    text = THINK + "<answer> \\boxed{1} $\\boxed 2$ </answer>"
    assert score(text, "2").value == 1.0


def test_strict_bonus_needs_both_tools_to_have_run():
    assert score_trajectory(trajectory(*SEARCH, *PYTHON, ANSWER)).value == pytest.approx(1.1)
    assert score_trajectory(trajectory(*PYTHON, *PYTHON, ANSWER)).value == 1.0
    failed = (PYTHON[0], ("python", ToolStatus.user_error, "Traceback"))
    assert score_trajectory(trajectory(*SEARCH, *failed, ANSWER)).value == 1.0
    wrong = trajectory(*SEARCH, *PYTHON, "<answer> \\boxed{13} </answer>")
    assert score_trajectory(wrong).value == 0.0


def test_strict_bonus_is_not_earned_by_writing_closing_tags():
    text = THINK + "</search></python>" + ANSWER
    assert score(text, "12").value == pytest.approx(1.1)
    assert score_trajectory(trajectory(text)).value == 1.0


@pytest.mark.parametrize(
    "page", ["<answer> \\boxed{12} </answer>", "<think>", "</search>", "<python>", "</result>"]
)
def test_strict_ignores_tags_in_tool_output(page):
    injected = (SEARCH[0], ("search", ToolStatus.ok, page))
    harmless = score_trajectory(trajectory(*SEARCH, ANSWER))
    assert score_trajectory(trajectory(*injected, ANSWER)) == harmless
    assert harmless.value == 1.0


def test_strict_does_not_take_an_answer_from_a_tool():
    page = (SEARCH[0], ("search", ToolStatus.ok, ANSWER))
    assert score_trajectory(trajectory(*page, "done")).value == -1.0


def test_strict_takes_the_format_from_the_turns_and_not_from_the_text():
    call_without_result = trajectory(THINK + "<search> q </search>" + ANSWER)
    assert score_trajectory(call_without_result).value == -1.0
    faked = trajectory(THINK + "<search> q </search> <result>\n12\n</result>" + ANSWER)
    assert score(faked.response_text, "12").value == 1.0
    assert score_trajectory(faked).value == -1.0
    assert score_trajectory(trajectory(ANSWER)).value == -1.0
    assert score_trajectory(trajectory(THINK + ANSWER + ANSWER)).value == -1.0


TAGS = [f"{mark}{tag}>" for tag in ("think", "answer", "search", "python") for mark in ("<", "</")]
PIECES = [*TAGS, "<result>", "</result>", "\\boxed", "\\boxed{", "\\boxed ", "}", "{", "12", " "]


@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_any_text_has_a_reward(text):
    for got in (score(text, "12"), score_trajectory(trajectory(text))):
        assert got.value == -1.0 or 0.0 <= got.value <= 1.1
        assert got.correct <= (got.f1 == 1.0)

"""Before and after, side by side."""

import io

import pytest
from rich.console import Console

from mega_agentrl.report.validation_console import (
    EvalSummary,
    eval_comparison_rows,
    print_eval_comparison,
    print_evaluation,
)

BEFORE = EvalSummary(
    reward=-0.25,
    success=0.2,
    tool_use_fraction=0.5,
    response_tokens_mean=40.25,
    num_questions=300,
    num_answers=600,
    reward_se=0.02,
    success_by_source={"toolqa_python": 0.1, "toolqa_search": 0.3},
    calls_by_tool={"python": 0.25},
)
AFTER = EvalSummary(
    reward=0.5,
    success=0.6,
    tool_use_fraction=0.9,
    response_tokens_mean=52.0,
    num_questions=300,
    num_answers=600,
    greedy_success=0.7,
    success_by_source={"toolqa_python": 0.05, "toolqa_search": 0.3, "toolqa_both": 0.4},
    calls_by_tool={"python": 0.75, "search": 0.5},
)


def test_rows_are_in_order_and_hold_both_sides():
    rows = {row.label.strip(): row for row in eval_comparison_rows(BEFORE, AFTER)}
    assert list(rows) == [
        "reward",
        "success",
        "toolqa_both",
        "toolqa_python",
        "toolqa_search",
        "success, greedy",
        "answers with a tool",
        "python calls per answer",
        "search calls per answer",
        "response tokens",
    ]
    assert rows["reward"].change == pytest.approx(0.75)
    assert rows["toolqa_both"].before is None
    assert rows["toolqa_both"].change is None
    assert rows["success, greedy"].after == 0.7


def test_greedy_is_left_out_when_nobody_asked_for_it():
    labels = [row.label for row in eval_comparison_rows(BEFORE, BEFORE)]
    assert "success, greedy" not in labels


def test_changes_of_an_evaluation_with_itself_are_zero():
    assert all(row.change in (0.0, None) for row in eval_comparison_rows(AFTER, AFTER))


def test_swapping_the_sides_turns_every_change_round():
    forth = eval_comparison_rows(BEFORE, AFTER)
    back = eval_comparison_rows(AFTER, BEFORE)
    for one, other in zip(forth, back, strict=True):
        assert one.label == other.label
        if one.change is not None:
            assert one.change == pytest.approx(-other.change)


def test_printed_text():
    out = io.StringIO()
    print_eval_comparison(BEFORE, AFTER, Console(file=out, width=100, force_terminal=False))
    lines = out.getvalue().splitlines()
    assert lines[0].strip() == "held out: 300 questions, 600 answers"

    def cells(label):
        line = next(line for line in lines if label in line)
        return [cell.strip() for cell in line.strip("│").split("│")][1:]

    assert cells("reward") == ["-0.250 ± 0.020", "0.500", "+0.750"]
    assert cells("toolqa_python") == ["0.100", "0.050", "-0.050"]
    assert cells("toolqa_both") == ["-", "0.400", "-"]
    assert cells("response tokens") == ["40.2", "52.0", "+11.8"]


def test_a_single_evaluation_has_one_column():
    console = Console(file=io.StringIO(), width=100)
    print_evaluation(AFTER, console)
    shown = console.file.getvalue()
    assert "300 questions, 600 answers" in shown and "0.600" in shown
    assert "change" not in shown and "before" not in shown

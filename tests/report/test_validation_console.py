"""Tables of evaluations before and after training."""

import io
from dataclasses import replace

from rich.console import Console

from mega_agentrl.report.validation_console import (
    EvalSummary,
    ScoredCount,
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


def test_rows_have_both_sides_and_every_source_and_tool():
    rows = eval_comparison_rows(BEFORE, AFTER)
    assert {row.label.strip(): (row.before, row.after) for row in rows} == {
        "reward": (-0.25, 0.5),
        "success": (0.2, 0.6),
        "toolqa_both": (None, 0.4),
        "toolqa_python": (0.1, 0.05),
        "toolqa_search": (0.3, 0.3),
        "success, greedy": (None, 0.7),
        "answers with a tool": (0.5, 0.9),
        "python calls per answer": (0.25, 0.75),
        "search calls per answer": (None, 0.5),
        "response tokens": (40.25, 52.0),
    }


def test_greedy_success_is_left_out_if_it_was_not_evaluated():
    labels = [row.label for row in eval_comparison_rows(BEFORE, BEFORE)]
    assert "success, greedy" not in labels


def test_the_table_shows_both_sides_and_their_change():
    out = io.StringIO()
    print_eval_comparison(BEFORE, AFTER, Console(file=out, width=100, force_terminal=False))
    lines = out.getvalue().splitlines()
    assert "300 questions, 600 answers" in lines[0]

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


def test_counts_stand_beside_the_means_where_answers_failed():
    summary = replace(
        AFTER,
        scored=ScoredCount(num_scored=2, num_answers=6),
        scored_by_source={
            "toolqa_both": ScoredCount(num_scored=2, num_answers=2),
            "toolqa_lost": ScoredCount(num_scored=0, num_answers=4),
        },
        first_failure="tool_failure: notes: KeyError",
    )
    rows = {row.label.strip(): row for row in eval_comparison_rows(summary, summary)}
    assert rows["toolqa_lost"].before is None
    assert str(rows["toolqa_lost"].before_scored) == "0 of 4 scored"
    assert str(rows["success"].after_scored) == "2 of 6 scored"
    assert str(rows["toolqa_both"].after_scored) == "", "nothing is missing"
    out = io.StringIO()
    print_evaluation(summary, Console(file=out, width=100, force_terminal=False))
    shown = out.getvalue()
    assert "2 of 6 scored" in shown and "0 of 4 scored" in shown
    assert "4 of 6 answers failed" in shown and "notes: KeyError" in shown


def test_the_change_is_over_the_questions_scored_in_both():
    """Before: a and b scored 0 and 1; after: b and c scored .5 and 1. Only b compares, 1 to .5."""
    all_scored = ScoredCount(num_scored=3, num_answers=3)
    two_scored = ScoredCount(num_scored=2, num_answers=3)
    means = {"a": (0.0, 0.0), "b": (1.0, 1.0)}, {"b": (0.5, 0.0), "c": (1.0, 1.0)}
    before, after = (
        replace(
            BEFORE,
            reward=reward,
            success=0.5,
            scored=two_scored,
            success_by_source={"toolqa_python": 0.5},
            scored_by_source={"toolqa_python": two_scored},
            question_means={"": found, "toolqa_python": found},
        )
        for reward, found in zip((0.5, 0.75), means, strict=True)
    )
    rows = {row.label.strip(): row for row in eval_comparison_rows(before, after)}
    assert (rows["reward"].change, rows["success"].change) == (-0.5, -1.0)
    assert rows["toolqa_python"].change == -1.0
    out = io.StringIO()
    print_eval_comparison(before, after, Console(file=out, width=120, force_terminal=False))
    assert out.getvalue().count("1 questions scored in both") == 3
    whole = [replace(one, scored=all_scored, scored_by_source={}) for one in (before, after)]
    rows = {row.label.strip(): row for row in eval_comparison_rows(*whole)}
    assert (rows["reward"].change, rows["reward"].change_note) == (0.25, "")


def test_without_a_question_scored_in_both_there_is_no_change():
    scored = ScoredCount(num_scored=1, num_answers=2)
    before, after = (
        replace(BEFORE, scored=scored, question_means={"": {name: (1.0, 1.0)}}) for name in "ab"
    )
    reward = eval_comparison_rows(before, after)[0]
    assert (reward.change, reward.change_note) == (None, "0 questions scored in both")

"""Bootstrap intervals and verdicts by hand, and the page and figure made from them."""

from dataclasses import replace

import pytest

from mega_agentrl.report.compare.algorithms import EvalCostPoint, RunCostCurve
from mega_agentrl.report.compare.scoreboard import (
    TaskScores,
    Verdict,
    bootstrap_interval,
    compare_paired,
    score_rows,
    scoreboard_markdown,
    write_scoreboard_figure,
)


def curve(algorithm, seed, reward):
    def point(tokens, value):
        return EvalCostPoint(num_tokens=tokens, num_tool_calls=1, reward=value, success=value)

    return RunCostCurve(
        algorithm=algorithm, seed=seed, eval_points=(point(0, 0.25), point(1000 + seed, reward))
    )


def curves(rewards_by_algorithm):
    return [
        curve(name, seed, reward)
        for name, rewards in rewards_by_algorithm.items()
        for seed, reward in enumerate(rewards, 1)
    ]


def task(rewards_by_algorithm, title="Game", **fields):
    rates = dict.fromkeys(rewards_by_algorithm, 2e-4)
    return TaskScores(
        title=title, curves=curves(rewards_by_algorithm), learning_rates=rates, **fields
    )


REWARDS = {
    "grpo": [0.5, 0.6, 0.4],
    "high": [0.6, 0.7, 0.6],
    "low": [0.4, 0.5, 0.1],
    "mixed": [0.7, 0.5, 0.4],
}


def test_the_interval_of_equal_values_has_no_width():
    interval = bootstrap_interval([0.25] * 5)
    assert (interval.low, interval.mean, interval.high) == (0.25, 0.25, 0.25)


def test_an_interval_is_that_of_resampled_means_and_reproducible():
    # Of the 4^4 = 256 resamples of 0, 0, 0, 4, the mean is k with probability
    # C(4, k) (1/4)^k (3/4)^(4-k): 0.316, 0.422, 0.211, 0.047, 0.004 for k = 0 to 4.
    # So 2.5 % lie at 0, and the upper 2.5 % begin within k = 3.
    interval = bootstrap_interval([0.0, 0.0, 0.0, 4.0])
    assert (interval.low, interval.mean, interval.high) == (0.0, 1.0, 3.0)
    assert bootstrap_interval([0.0, 0.0, 0.0, 4.0]) == interval


def test_shift_and_scale_of_values_are_those_of_the_interval():
    values = [0.1, 0.4, 0.5, 0.9, 0.3]
    plain = bootstrap_interval(values)
    moved = bootstrap_interval([2 * value + 1 for value in values])
    for name in ("low", "mean", "high"):
        assert getattr(moved, name) == pytest.approx(2 * getattr(plain, name) + 1)
    assert plain.low < plain.mean < plain.high


def test_differences_are_taken_seed_by_seed():
    # The rewards overlap, but every seed gains 0.1.
    first = {1: 0.2, 2: 0.5, 3: 0.9}
    second = {1: 0.3, 2: 0.6, 3: 1.0, 4: 0.0}
    difference, verdict = compare_paired(second, first)
    assert verdict is Verdict.better
    assert [difference.low, difference.mean, difference.high] == pytest.approx([0.1, 0.1, 0.1])
    assert compare_paired(first, second)[1] is Verdict.worse


def test_a_difference_counts_only_if_its_interval_excludes_zero():
    base = dict.fromkeys(range(1, 6), 0.0)
    # One seed of five without a difference: all five drawn have it with probability 0.0003.
    assert compare_paired({1: 0, 2: 0.1, 3: 0.1, 4: 0.1, 5: 0.1}, base)[1] is Verdict.better
    # Four of five: none of the fifth is drawn with probability 0.33.
    assert compare_paired({1: 0, 2: 0, 3: 0, 4: 0, 5: 0.1}, base)[1] is Verdict.no_difference
    assert compare_paired({1: 0.1}, base) == (None, Verdict.too_few)


def test_rows_are_sorted_by_reward_and_have_verdicts():
    rows = score_rows(task(REWARDS), baseline="grpo")
    assert [(row.algorithm, row.verdict) for row in rows] == [
        ("high", Verdict.better),
        ("mixed", Verdict.no_difference),
        ("grpo", Verdict.baseline),
        ("low", Verdict.worse),
    ]
    assert rows[0].reward.mean == pytest.approx(1.9 / 3)
    assert rows[0].difference.mean == pytest.approx(0.4 / 3)
    assert rows[0].num_tokens == 1002
    assert rows[2].difference is None


@pytest.fixture
def page():
    tasks = [
        task(
            REWARDS,
            tuning_rewards={"high": {1e-4: 0.4, 2e-4: 0.5}},
            skipped={"ppo": "it has a critic"},
            stopped={"low, seed 1": "no group is left"},
        ),
        task({name: REWARDS["grpo"] for name in ("grpo", "high")}, title="Even"),
    ]
    return scoreboard_markdown(
        tasks, baseline="grpo", introduction="2026-11-24", figure="scoreboard.svg"
    )


def test_the_page_names_winners_and_undecided_games(page):
    assert (
        "* Game: `high` is better than `grpo`. `low` is worse. No difference is shown for `mixed`."
        in page
    )
    assert "* Even: **Nobody is better than `grpo`.** No difference is shown for `high`." in page
    assert "* On every task: nobody is better than `grpo`." in page
    # Four comparisons of three seeds: each has one sign by chance with probability 1/4.
    assert "at least 1.0 of these 4 comparisons" in page


def test_the_page_has_a_table_of_each_task_and_what_was_not_run(page):
    lines = page.splitlines()
    high = next(line for line in lines if line.startswith("| `high` | 3 | 0.0002 | 0.633 ["))
    assert "| +0.133 [+0.100, +0.200] | better | 1,002 |" in high
    assert any(line.startswith("| `grpo`") and " | - | baseline |" in line for line in lines)
    assert "Before training the reward is 0.250." in page
    assert "* `high`: 0.0001 gives 0.400, 0.0002 gives 0.500" in page
    assert "* `ppo`: it has a critic" in page
    assert "* `low, seed 1`: no group is left" in page
    assert "![" in page and "(scoreboard.svg)" in page


def test_the_page_says_whose_learning_rate_differs_from_the_baselines():
    rates = {"grpo": 2e-4, "high": 1e-4, "low": 2e-4, "mixed": 1e-4}
    scores = replace(task(REWARDS), learning_rates=rates)
    page = scoreboard_markdown([scores], baseline="grpo", introduction="", figure="x.svg")
    assert "`low` is worse. Of these, `high` had another learning rate than `grpo`," in page
    page = scoreboard_markdown([task(REWARDS)], baseline="grpo", introduction="", figure="x.svg")
    assert "another learning rate" not in page


def test_a_winner_on_all_tasks_is_named():
    tasks = [task(REWARDS), task(REWARDS, title="Other")]
    page = scoreboard_markdown(tasks, baseline="grpo", introduction="", figure="x.svg")
    assert "* On every task: `high` is better than `grpo`." in page


@pytest.mark.parametrize("rewards", [{}, {"grpo": [0.1], "high": [0.5]}], ids=["no", "single"])
def test_with_too_few_runs_there_is_no_comparison(rewards):
    page = scoreboard_markdown([task(rewards)], baseline="grpo", introduction="", figure="x.svg")
    assert "* Game: Nothing is compared yet." in page
    assert "better than" not in page and "chance" not in page
    if rewards:
        assert "Too few seeds: `high`." in page
        assert "| `high` | 1 | 0.0002 | 0.500 | - | too few seeds | 1,001 |" in page


def test_the_figure_names_every_algorithm_and_is_reproducible(tmp_path):
    tasks = [task(REWARDS), task({"grpo": [0.1]}, title="Even")]
    write_scoreboard_figure(tmp_path / "a.svg", tasks, baseline="grpo")
    write_scoreboard_figure(tmp_path / "b.svg", tasks, baseline="grpo")
    text = (tmp_path / "a.svg").read_text()
    for name in (*REWARDS, "Game", "Even"):
        assert f"<!-- {name} -->" in text
    assert text == (tmp_path / "b.svg").read_text()

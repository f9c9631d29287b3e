"""A task's runner plans runs, finds the missing ones and summarises the finished ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.algorithms import EvalCostPoint
from tools.compare.budget import Budget
from tools.compare.run import RESULT, FinishedRun, claim_folder, write_json
from tools.compare.task_runner import TaskRunner, choose_learning_rate

pytestmark = pytest.mark.extended

BEST = {"grpo": 1e-4, "arpo": 4e-4}


def finish(run, reward):
    end = EvalCostPoint(num_tokens=510, num_tool_calls=0, reward=reward, success=reward)
    start = replace(end, num_tokens=0, reward=0.3)
    folder = Path(run.config.run_dir)
    claim_folder(folder, run.settings)
    write_json(folder / RESULT, FinishedRun(evaluations=(start, end)))


def names(runs):
    return [(run.algorithm, run.learning_rate, run.seed) for run in runs]


def finish_tuning(runner, num_runs=4):
    for run in runner.tuning_runs[:num_runs]:
        finish(run, 0.8 if run.learning_rate == BEST[run.algorithm] else 0.4)


def test_the_highest_reward_wins_and_among_equal_ones_the_lowest_rate():
    assert choose_learning_rate({4e-4: 0.5, 1e-4: 0.4, 2e-4: 0.6}) == 2e-4
    assert choose_learning_rate({4e-4: 0.5, 1e-4: 0.5, 2e-4: 0.4}) == 1e-4


def test_every_algorithm_is_tuned_alike_before_it_is_scored(make_runner):
    runner = make_runner()
    assert names(runner.tuning_runs) == [
        ("grpo", 1e-4, 9),
        ("arpo", 1e-4, 9),
        ("grpo", 4e-4, 9),
        ("arpo", 4e-4, 9),
    ]
    assert runner.scored_runs == []
    finish_tuning(runner)
    runner.read_finished()
    assert runner.learning_rates == BEST
    assert names(runner.scored_runs) == [
        ("grpo", 1e-4, 1),
        ("arpo", 4e-4, 1),
        ("grpo", 1e-4, 2),
        ("arpo", 4e-4, 2),
    ]


def test_an_algorithm_whose_tuning_is_not_complete_is_not_scored(make_runner):
    runner = make_runner()
    finish_tuning(runner, num_runs=3)
    runner.read_finished()
    assert names(runner.scored_runs) == [("grpo", 1e-4, 1), ("grpo", 1e-4, 2)]


def test_one_learning_rate_needs_no_tuning(make_runner):
    runner = make_runner(learning_rates=(3e-4,))
    assert runner.tuning_runs == []
    assert len(runner.scored_runs) == 4


def test_only_missing_runs_are_run_and_those_of_a_rate_together(make_runner, monkeypatch):
    groups = []
    monkeypatch.setattr(
        TaskRunner, "_run_group", lambda self, runs, built: groups.append(names(runs))
    )
    first = make_runner()
    finish_tuning(first)
    first.read_finished()
    finish(first.scored_runs[1], 0.7)
    again = make_runner()
    again.read_finished()
    again.run_missing()
    assert groups == [[("grpo", 1e-4, 1), ("grpo", 1e-4, 2)], [("arpo", 4e-4, 2)]]


def test_each_critic_has_components_of_its_own(make_runner, monkeypatch):
    groups = []
    monkeypatch.setattr(
        TaskRunner,
        "_run_group",
        lambda self, runs, built: groups.append(
            ({run.algorithm for run in runs}, built.algo.advantage, built.optim.critic_lr)
        ),
    )
    runner = make_runner(learning_rates=(1e-4,))
    without = runner.base.config
    for name, critic_lr in (("ppo", 1e-3), ("ppo+faster", 2e-3)):
        algo = replace(without.algo, advantage="gae")
        optim = replace(without.optim, critic_lr=critic_lr)
        config = replace(without, algo=algo, optim=optim)
        runner.algorithms[name] = replace(runner.base, config=config)
    runner.run_missing()
    assert groups == [
        ({"grpo", "arpo"}, without.algo.advantage, without.optim.critic_lr),
        ({"ppo"}, "gae", 1e-3),
        ({"ppo+faster"}, "gae", 2e-3),
    ]


def test_scores_have_the_scored_runs_only(make_runner):
    runner = make_runner()
    finish_tuning(runner)
    runner.read_finished()
    for run in runner.scored_runs:
        finish(run, 0.5 + 0.1 * run.seed)
    again = make_runner()
    again.read_finished()
    scores = again.scores()
    assert [(curve.algorithm, curve.seed) for curve in scores.curves] == [
        ("grpo", 1),
        ("grpo", 2),
        ("arpo", 1),
        ("arpo", 2),
    ]
    assert [curve.eval_points[-1].reward for curve in scores.curves] == [0.6, 0.7, 0.6, 0.7]
    assert scores.tuning_rewards == {"grpo": {1e-4: 0.8, 4e-4: 0.4}, "arpo": {1e-4: 0.4, 4e-4: 0.8}}
    assert scores.skipped == {"gigpo": "one turn"}


def test_results_of_another_budget_are_refused(make_runner):
    finish_tuning(make_runner())
    other = make_runner(budget=Budget(num_tokens=900, num_steps=None, num_evaluations=1))
    with pytest.raises(InputError) as caught:
        other.read_finished()
    assert caught.value.got == "a run with other values of budget.num_tokens"

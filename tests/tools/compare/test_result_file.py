"""Results in one file: another machine continues from them, other settings do not count."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.algorithms import EvalCostPoint
from tools.compare.result_file import ResultFile, digest_settings
from tools.compare.run import FinishedRun

pytestmark = pytest.mark.extended

START = EvalCostPoint(num_tokens=0, num_tool_calls=0, reward=0.3, success=0.3)


def result(reward):
    return FinishedRun(evaluations=(START, replace(START, num_tokens=510, reward=reward)))


def finish_all(runner):
    for run in runner.tuning_runs:
        runner._add_finished(run, result(0.8 if run.learning_rate == 1e-4 else 0.4))
    for run in runner.scored_runs:
        runner._add_finished(run, result(0.5 + 0.1 * run.seed))


def test_another_machine_reads_all_results(make_runner, tmp_path):
    file = tmp_path / "results" / "results.jsonl"
    first = make_runner(results=file, commit="abc1234")
    finish_all(first)
    shutil.rmtree(tmp_path / "orders", ignore_errors=True)
    again = make_runner(results=file, commit="def5678")
    again.read_finished()
    assert again.scores() == first.scores()
    assert ResultFile(file).commits == ["abc1234"]


def test_runs_with_other_settings_are_not_finished(make_runner, tmp_path):
    file = tmp_path / "results.jsonl"
    finish_all(make_runner(results=file))
    again = make_runner(results=file, learning_rates=(2e-4, 4e-4))
    again.read_finished()
    assert {run.learning_rate for run, _ in again.finished} == {4e-4}


def test_a_setting_at_its_default_does_not_change_the_digest():
    settings = {"optim": {"lr": 3e-4}}
    assert digest_settings(settings) == digest_settings({"optim": {"lr": 3e-4}, "seed": 1})
    assert digest_settings(settings) != digest_settings({"optim": {"lr": 1e-4}})


def test_results_of_another_warm_start_are_refused(make_runner, tmp_path):
    runner = make_runner(results=tmp_path / "results.jsonl")
    finish_all(runner)
    runner._check_same_start(replace(START, reward=0.302), is_tuning=False)
    with pytest.raises(InputError) as caught:
        runner._check_same_start(replace(START, reward=0.32), is_tuning=False)
    assert caught.value.got == 0.3


@pytest.mark.parametrize("line", ["{", '{"task": "orders"}'], ids=["cut", "incomplete"])
def test_a_damaged_line_is_named(tmp_path, line):
    file = tmp_path / "results.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InputError) as caught:
        ResultFile(file)
    assert caught.value.name == f"{file}, line 1"

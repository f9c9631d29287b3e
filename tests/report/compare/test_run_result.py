"""One run read back: finished, failed before it began, killed."""

import json
import math

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.run_result import (
    STATE_DONE,
    STATE_FAILED,
    STATE_UNFINISHED,
    find_run_dirs,
    read_run_result,
)


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def step(number, tokens, calls):
    return {
        "stage": "rl",
        "step": number,
        "rollout/sampled_tokens_mean": tokens,
        "rollout/tool_calls_mean": calls,
        "rollout/num_trajectories": 8.0,
        "time/rollout_s": 2.0,
        "time/update_s": 1.0,
    }


def held_out(when, number, reward):
    return {
        "stage": f"held_out_{when}",
        "step": number,
        "sampled/reward": reward,
        "sampled/success": reward,
    }


@pytest.fixture
def folder(tmp_path):
    run_dir = tmp_path / "3-seed=7"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("seed: 7\nrun_dir: x\noptim:\n  lr: 0.5\n")
    (run_dir / "metrics.jsonl").write_text(
        lines(
            held_out("before", 0, 0.25), step(1, 10.0, 0.5), step(2, 20.0, 1.0),
            held_out("after", 2, 0.75),
        )
    )  # fmt: skip
    return run_dir


def test_a_finished_run_has_settings_costs_and_evaluations(folder):
    (folder / "summary.json").write_text(json.dumps({"train_seconds": 12.5}))
    run = read_run_result(folder)
    assert (run.state, run.seed, run.settings) == (STATE_DONE, 7, {"optim.lr": "0.5"})
    assert (run.num_tokens, run.num_tool_calls, run.train_s) == (240, 12, 12.5)
    assert [(m.num_tokens, m.num_tool_calls, m.reward) for m in run.eval_points] == [
        (0, 0, 0.25),
        (240, 12, 0.75),
    ]


@pytest.mark.parametrize(
    ("summary", "fraction"),
    [
        ({"failed": {"training": {"num_failed": 1, "num_trajectories": 4}}}, 0.25),
        ({"failed": {"training": None}}, None),
        ({}, None),
    ],
    ids=["number", "null", "missing"],
)
def test_the_fraction_of_failed_trajectories_is_nan_if_unknown(folder, summary, fraction):
    (folder / "summary.json").write_text(json.dumps(summary))
    found = read_run_result(folder).failed_fraction
    assert math.isnan(found) if fraction is None else found == fraction


@pytest.mark.parametrize(
    "summary",
    [
        b'{"train_seconds": "x"}',
        b'{"failed": {"training": {"num_failed": "1"}}}',
        b'{"failed": {"training": {"num_failed": -1, "num_trajectories": 4}}}',
        b'{"failed": 3}',
        b"[" * 100_000,
        b"\xff",
        b"[1]",
    ],
    ids=["seconds", "text", "sign", "number", "depth", "no UTF-8", "a list"],
)
def test_a_summary_with_other_values_is_refused_by_name(folder, summary):
    (folder / "summary.json").write_bytes(summary)
    with pytest.raises(InputError) as caught:
        read_run_result(folder)
    assert caught.value.name == str(folder / "summary.json")


@pytest.mark.parametrize("settings", ["a: [", "a: &a [1,1]\n" + "b: &b [*a,*a]\n" * 2])
def test_settings_that_are_no_yaml_are_refused_by_name(folder, settings):
    (folder / "config.yaml").write_text(settings)
    with pytest.raises(InputError) as caught:
        read_run_result(folder)
    assert caught.value.name == str(folder / "config.yaml")


def test_failed_answers_are_those_of_all_evaluations(folder):
    before, after = ({"num_failed": n, "num_trajectories": 8} for n in (1, 3))
    summary = {"failed": {"training": None, "before": before, "after": after}}
    (folder / "summary.json").write_text(json.dumps(summary))
    found = read_run_result(folder)
    assert found.held_out_failed_fraction == 0.25 and math.isnan(found.failed_fraction)


def test_the_result_of_a_killed_run_has_the_steps_that_were_written(folder):
    run = read_run_result(folder)
    assert (run.state, run.failure_reason, run.train_s) == (STATE_UNFINISHED, "", 6.0)


def test_the_result_of_a_job_that_failed_before_its_first_step(tmp_path):
    job = {"overrides": ["algo=grpo", "seed=5"], "failed": "optim.lr=-1: expected more"}
    (tmp_path / "sweep_job.json").write_text(json.dumps(job))
    run = read_run_result(tmp_path)
    assert (run.state, run.seed, run.failure_reason) == (STATE_FAILED, 5, job["failed"])
    assert run.eval_points == ()


def test_runs_of_a_sweep_come_by_number(tmp_path):
    for name in ("10-a", "2-b", "logs"):
        (tmp_path / name).mkdir()
    for name in ("10-a", "2-b"):
        (tmp_path / name / "config.yaml").write_text("seed: 1\n")
    assert [path.name for path in find_run_dirs(tmp_path)] == ["2-b", "10-a"]
    assert find_run_dirs(tmp_path / "2-b") == [tmp_path / "2-b"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    for read in (find_run_dirs, read_run_result):
        with pytest.raises(InputError) as caught:
            read(tmp_path)
        assert caught.value.name == str(tmp_path)
    (tmp_path / "sweep_job.json").write_text("{")
    with pytest.raises(InputError) as caught:
        read_run_result(tmp_path)
    assert caught.value.name == str(tmp_path / "sweep_job.json")

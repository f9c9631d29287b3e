"""Runs in a table: seeds become one row, failed runs are listed; numbers by hand."""

import json
import math

import pytest

from mega_agentrl.report.compare.algorithms import EvalCostPoint
from mega_agentrl.report.compare.run_result import (
    STATE_DONE,
    STATE_FAILED,
    STATE_UNFINISHED,
    RunResult,
)
from mega_agentrl.report.compare.sweep_table import (
    build_sweep_rows,
    finished_run_curves,
    group_runs_by_settings,
    sweep_json,
    sweep_markdown,
    write_sweep_report,
)


def run(name, *overrides, rewards=(0.25, 0.5), seed=1, state=STATE_DONE, reason="", **changes):
    marks = tuple(
        EvalCostPoint(num_tokens=100 * k, num_tool_calls=10 * k, reward=reward, success=reward / 2)
        for k, reward in enumerate(rewards)
    )
    given = {"num_tokens": 100, "num_tool_calls": 10, "train_s": 90.0, "settings": {}} | changes
    return RunResult(
        name=name,
        seed=seed,
        overrides=overrides,
        state=state,
        failure_reason=reason,
        eval_points=marks,
        **given,
    )


def failed(name, *overrides, reason):
    return run(name, *overrides, state=STATE_FAILED, reason=reason, rewards=())


RUNS = [
    run(
        "0-a",
        "experiment=x",
        "algo=grpo",
        "seed=1",
        rewards=(0.1, 0.4),
        failed_fraction=0.1,
        held_out_failed_fraction=0.5,
    ),
    run(
        *("1-b", "experiment=x", "algo=grpo", "seed=2"),
        **{
            "seed": 2,
            "rewards": (0.3, 0.8),
            "num_tokens": 300,
            "failed_fraction": 0.05,
            "held_out_failed_fraction": 0.25,
        },
    ),
    run("2-c", "experiment=x", "algo=arpo", "seed=1", rewards=(0.1, 0.9), train_s=60.0),
    failed("3-d", "experiment=x", "algo=arpo", "seed=2", reason="boom\nmore"),
]


def test_seeds_are_one_row_and_failed_runs_count_in_no_mean():
    grpo, arpo = build_sweep_rows(RUNS)
    assert (grpo.name, grpo.num_runs, grpo.num_finished_runs) == ("algo=grpo", 2, 2)
    assert grpo.reward_before == pytest.approx(0.2)
    assert grpo.reward_after == pytest.approx(0.6)
    assert grpo.reward_after_std == pytest.approx(math.sqrt(0.08))  # (0.2^2 + 0.2^2) / 1
    assert grpo.success_before == pytest.approx(0.1)
    assert grpo.success_after_std == pytest.approx(math.sqrt(0.02))
    assert grpo.failed_fraction == pytest.approx(0.075)
    assert grpo.held_out_failed_fraction == pytest.approx(0.375)
    assert math.isnan(arpo.failed_fraction), "an earlier version wrote no such summary"
    assert (grpo.num_tokens, grpo.num_tool_calls, grpo.minutes) == (200, 10, 1.5)
    assert (arpo.name, arpo.num_runs, arpo.num_finished_runs) == ("algo=arpo", 2, 1)
    assert (arpo.reward_after, arpo.reward_after_std, arpo.minutes) == (0.9, None, 1.0)


def test_the_table_lists_failed_and_unfinished_runs():
    text = sweep_markdown(
        [*RUNS, run("4-e", "experiment=x", "algo=x", state=STATE_UNFINISHED, rewards=())]
    )
    grpo = "0.200 ± 0.141 | 0.600 ± 0.283 | 0.100 ± 0.071 | 0.300 ± 0.141 | 7.5% | 37.5%"
    assert "| failed in training | failed held out |" in text
    assert f"| algo=grpo | 2 | {grpo} | 200 | 10 | 1.5 |" in text
    assert "| algo=arpo | 1 of 2 | 0.100 | 0.900 | 0.050 | 0.450 | - | - |" in text
    assert "| algo=x | 0 of 1 | - | - | - | - | - | - | - | - | - |" in text
    assert "* 3-d: failed: boom\n" in text
    assert "* 4-e: unfinished: " in text


def test_runs_without_overrides_are_named_by_their_settings():
    runs = [
        run("one", settings={"optim.lr": "0.1", "algo.clip": "0.2"}),
        run("two", settings={"optim.lr": "0.3", "algo.clip": "0.2"}, seed=4),
        run("three", settings={"optim.lr": "0.3", "algo.clip": "0.2"}, seed=5),
    ]
    groups = group_runs_by_settings(runs)
    assert {name: len(group) for name, group in groups.items()} == {
        "optim.lr=0.1": 1,
        "optim.lr=0.3": 2,
    }
    assert list(group_runs_by_settings(runs[1:])) == ["two"], "one group is called by its first run"


def test_every_run_is_in_one_group():
    runs = [run("a", "x=1"), run("b", "x=1", "y=2"), run("c", "y=2"), run("d", "z=3", "x=1")]
    groups = group_runs_by_settings(runs)
    assert sorted(one.name for group in groups.values() for one in group) == ["a", "b", "c", "d"]
    assert len(groups) == 4


def test_curves_that_were_evaluated_differently_keep_their_ends():
    runs = [run("a", "x=1", rewards=(0.0, 0.5, 1.0)), run("b", "x=1", seed=2, rewards=(0.0, 0.2))]
    assert [[mark.reward for mark in curve.eval_points] for curve in finished_run_curves(runs)] == [
        [0.0, 1.0],
        [0.0, 0.2],
    ]


def test_three_files_are_written_and_the_json_has_no_nan(tmp_path):
    text = write_sweep_report(tmp_path / "sweep", RUNS)
    assert (tmp_path / "sweep/comparison.md").read_text() == text
    assert (tmp_path / "sweep/comparison.png").read_bytes()[:4] == b"\x89PNG"
    plain = json.loads((tmp_path / "sweep/comparison.json").read_text())
    assert [row["name"] for row in plain["rows"]] == ["algo=grpo", "algo=arpo"]
    assert [one["state"] for one in plain["runs"]] == [*[STATE_DONE] * 3, STATE_FAILED]


def test_a_sweep_without_a_finished_run_has_a_table_and_no_plot(tmp_path):
    write_sweep_report(tmp_path, RUNS[3:])
    assert sweep_json(RUNS[3:])["rows"][0]["reward_after"] is None
    assert not (tmp_path / "comparison.png").exists()

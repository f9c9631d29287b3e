"""Runs beside each other: seeds become one row, failed ones are said, numbers are hand-worked."""

import json
import math

import pytest

from mega_agentrl.report.comparison import Mark
from mega_agentrl.report.run_result import DONE, FAILED, UNFINISHED, RunResult
from mega_agentrl.report.sweep_table import (
    as_json,
    curves_of,
    markdown,
    named_groups,
    sweep_rows,
    write_sweep,
)


def run(name, *overrides, rewards=(0.25, 0.5), seed=1, state=DONE, reason="", **changes):
    marks = tuple(
        Mark(num_tokens=100 * k, num_calls=10 * k, reward=reward, success=reward / 2)
        for k, reward in enumerate(rewards)
    )
    given = {"num_tokens": 100, "num_calls": 10, "seconds": 90.0, "settings": {}} | changes
    return RunResult(
        name=name,
        seed=seed,
        overrides=overrides,
        state=state,
        reason=reason,
        marks=marks,
        **given,
    )


RUNS = [
    run("0-a", "experiment=x", "algo=grpo", "seed=1", rewards=(0.1, 0.4)),
    run("1-b", "experiment=x", "algo=grpo", "seed=2", seed=2, rewards=(0.3, 0.8), num_tokens=300),
    run("2-c", "experiment=x", "algo=arpo", "seed=1", rewards=(0.1, 0.9), seconds=60.0),
    run(
        "3-d", "experiment=x", "algo=arpo", "seed=2", state=FAILED, reason="boom\nmore", rewards=()
    ),
]


def test_seeds_are_one_row_and_failed_runs_count_in_no_mean():
    grpo, arpo = sweep_rows(RUNS)
    assert (grpo.name, grpo.num_runs, grpo.num_done) == ("algo=grpo", 2, 2)
    assert grpo.before == pytest.approx(0.2)
    assert grpo.after == pytest.approx(0.6)
    assert grpo.after_spread == pytest.approx(math.sqrt(0.08))  # (0.2^2 + 0.2^2) / 1
    assert (grpo.num_tokens, grpo.num_calls, grpo.minutes) == (200, 10, 1.5)
    assert (arpo.name, arpo.num_runs, arpo.num_done) == ("algo=arpo", 2, 1)
    assert (arpo.after, arpo.after_spread, arpo.minutes) == (0.9, None, 1.0)


def test_the_table_says_what_failed():
    text = markdown([*RUNS, run("4-e", "experiment=x", "algo=x", state=UNFINISHED, rewards=())])
    assert "| algo=grpo | 2 | 0.200 ± 0.141 | 0.600 ± 0.283 | 0.300 | 200 | 10 | 1.5 |" in text
    assert "| algo=arpo | 1 of 2 | 0.100 | 0.900 |" in text
    assert "| algo=x | 0 of 1 | - | - | - | - | - | - |" in text
    assert "* 3-d: failed: boom\n" in text
    assert "* 4-e: unfinished: it was killed, or is still running" in text


def test_runs_without_overrides_are_named_by_their_settings():
    runs = [
        run("one", settings={"optim.lr": "0.1", "algo.clip": "0.2"}),
        run("two", settings={"optim.lr": "0.3", "algo.clip": "0.2"}, seed=4),
        run("three", settings={"optim.lr": "0.3", "algo.clip": "0.2"}, seed=5),
    ]
    groups = named_groups(runs)
    assert {name: len(group) for name, group in groups.items()} == {
        "optim.lr=0.1": 1,
        "optim.lr=0.3": 2,
    }
    assert list(named_groups(runs[1:])) == ["two"], "one group is called by its first run"


def test_every_run_is_in_one_group_whatever_they_are_called():
    runs = [run("a", "x=1"), run("b", "x=1", "y=2"), run("c", "y=2"), run("d", "z=3", "x=1")]
    groups = named_groups(runs)
    assert sorted(one.name for group in groups.values() for one in group) == ["a", "b", "c", "d"]
    assert len(groups) == 4


def test_curves_that_were_evaluated_differently_keep_their_ends():
    runs = [run("a", "x=1", rewards=(0.0, 0.5, 1.0)), run("b", "x=1", seed=2, rewards=(0.0, 0.2))]
    assert [[mark.reward for mark in curve.marks] for curve in curves_of(runs)] == [
        [0.0, 1.0],
        [0.0, 0.2],
    ]


def test_three_files_are_written_and_the_json_has_no_nan(tmp_path):
    text = write_sweep(tmp_path / "sweep", RUNS)
    assert (tmp_path / "sweep/comparison.md").read_text() == text
    assert (tmp_path / "sweep/comparison.png").read_bytes()[:4] == b"\x89PNG"
    plain = json.loads((tmp_path / "sweep/comparison.json").read_text())
    assert [row["name"] for row in plain["rows"]] == ["algo=grpo", "algo=arpo"]
    assert [one["state"] for one in plain["runs"]] == [DONE, DONE, DONE, FAILED]


def test_a_sweep_of_which_nothing_finished_has_a_table_and_no_plot(tmp_path):
    write_sweep(tmp_path, RUNS[3:])
    assert as_json(RUNS[3:])["rows"][0]["after"] is None
    assert not (tmp_path / "comparison.png").exists()

"""Evaluations before and after, by hand."""

from __future__ import annotations

import math

from mega_agentrl.report.metrics_file import MetricLine
from mega_agentrl.report.page.validation_table import validation_rows, validation_table

BEFORE = {
    "sampled/new": 1.0,
    "sampled/success/b": 0.5,
    "sampled/reward": 0.25,
    "sampled/reward_se": 0.125,
    "sampled/rollout/entropy": 0.5,
    "sampled/rollout/stop/eos": 0.9,
    "time/rollout_s": 3.0,
}
AFTER = {"sampled/reward": 1.0, "sampled/rollout/entropy": 0.25, "greedy/success": 0.5}


def line(step, values):
    return MetricLine(stage=f"held_out_{step}", step=step, values=values)


def test_known_rows_first_then_sources_then_the_rest():
    rows = validation_rows(BEFORE, AFTER)
    assert [row.label for row in rows] == [
        "reward",
        "success, greedy",
        "entropy, nats",
        "success on b",
        "new",
    ]
    assert (rows[0].before, rows[0].after, rows[0].before_se, rows[0].after_se) == (
        0.25,
        1.0,
        0.125,
        None,
    )
    assert rows[1].change is None


def test_changes_have_a_colour_where_more_is_better():
    drawn = validation_table([line(0, BEFORE), line(40, AFTER)])
    assert '<td class="up">+0.75</td>' in drawn
    assert "<td>-0.25</td>" in drawn
    assert "after step 0" in drawn and "after step 40" in drawn
    assert "± 0.125" in drawn


def test_a_single_evaluation_has_no_change():
    drawn = validation_table([line(3, BEFORE)])
    assert "change" not in drawn and drawn.count("<td") == 4


def test_hostile_names_and_values_that_are_no_numbers():
    drawn = validation_table([line(0, {"sampled/reward/<i>": math.nan}), line(1, {})])
    assert "<i>" not in drawn and "nan" in drawn

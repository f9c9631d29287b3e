"""Tool outcomes of a run, and evaluations before and after, by hand."""

from __future__ import annotations

import json
import math

import pytest

from mega_agentrl.report.metrics_file import MetricLine, parse_metrics
from mega_agentrl.report.page.tables import tool_rows, tool_table, validation_rows, validation_table


def step(stage, number, prefix="rollout/tool/", **tools):
    values = {
        f"{prefix}{tool}/{key}": value
        for tool, keys in tools.items()
        for key, value in keys.items()
    }
    return {"stage": stage, "step": number, "sampled/reward": 0.0, **values}


def rows_of(*lines):
    return tool_rows(parse_metrics(json.dumps(line) for line in lines))


def test_counts_add_up_and_latencies_are_weighted_by_calls():
    first = {"num_calls": 10, "num_ok": 9, "num_timeout": 1, "latency_mean_s": 1.0}
    first |= {"latency_p50_s": 0.5, "latency_p99_s": 4.0, "latency_max_s": 5.0, "step_reward": 0.2}
    second = {"num_calls": 30, "num_ok": 30, "num_timeout": 0, "latency_mean_s": 3.0}
    second |= {"latency_p50_s": 1.5, "latency_p99_s": 2.0, "latency_max_s": math.nan}
    (row,) = rows_of(step("rl", 1, python=first), step("rl", 2, python=second))
    assert (row.name, row.num_calls) == ("python", 40)
    assert row.num_by_status == {"ok": 39, "user_error": 0, "timeout": 1, "infra_error": 0}
    assert row.mean_s == pytest.approx(2.5)
    assert (row.p50_s, row.p99_s, row.max_s, row.queue_s) == (1.0, 4.0, 5.0, None)
    assert row.reward == pytest.approx(0.1)


def test_tools_of_a_run_that_only_evaluates():
    line = step("held_out_before", 0, "sampled/rollout/tool/", search={"num_calls": 2, "num_ok": 2})
    (row,) = rows_of(line)
    assert (row.name, row.num_calls, row.mean_s) == ("search", 2, None)
    assert rows_of({"stage": "rl", "step": 1, "rollout/calls/python": 1.0}) == []


def test_the_tool_table_escapes_names_and_draws_shares():
    (row,) = rows_of(step("rl", 1, **{"<b>": {"num_calls": 4, "num_ok": 3, "num_user_error": 1}}))
    drawn = tool_table([row])
    assert "<b>" not in drawn and "&lt;b&gt;" in drawn
    assert 'x="0.00" width="75.00" height="8" class="o-ok"' in drawn
    assert 'x="75.00" width="25.00" height="8" class="o-user_error"' in drawn
    assert "o-timeout" not in drawn and "75.0%" in drawn


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


def test_labelled_rows_come_first_then_sources_then_the_rest():
    rows = validation_rows(BEFORE, AFTER)
    labels = ["reward", "success, greedy", "entropy, nats", "success on b", "new"]
    assert [row.label for row in rows] == labels
    reward, greedy = rows[:2]
    assert (reward.before, reward.after) == (0.25, 1.0)
    assert (reward.before_se, reward.after_se) == (0.125, None)
    assert greedy.change is None


def test_changes_have_a_colour_where_more_is_better():
    drawn = validation_table([line(0, BEFORE), line(40, AFTER)])
    assert '<td class="up">+0.75</td>' in drawn
    assert "<td>-0.25</td>" in drawn
    assert "after step 0" in drawn and "after step 40" in drawn
    assert "± 0.125" in drawn


def test_a_single_evaluation_has_no_change():
    drawn = validation_table([line(3, BEFORE)])
    assert "change" not in drawn and drawn.count("<td") == 4


def test_the_validation_table_escapes_names_and_shows_nan():
    drawn = validation_table([line(0, {"sampled/reward/<i>": math.nan}), line(1, {})])
    assert "<i>" not in drawn and "nan" in drawn


def test_counts_stand_beside_the_means_also_of_a_source_without_a_score():
    values = {
        "sampled/reward": 0.5,
        "sampled/num_answers": 6.0,
        "sampled/num_scored": 2.0,
        "sampled/success/easy": 1.0,
        "sampled/num_answers/easy": 2.0,
        "sampled/num_scored/easy": 2.0,
        "sampled/num_answers/hard": 4.0,
        "sampled/num_scored/hard": 0.0,
    }
    rows = {row.label: row for row in validation_rows(values, {})}
    assert list(rows) == ["reward", "success on easy", "success on hard"]
    assert rows["success on hard"].before is None
    assert str(rows["success on hard"].before_scored) == "0 of 4 scored"
    table = validation_table([line(0, values)])
    assert "2 of 6 scored" in table and "0 of 4 scored" in table and "2 of 2" not in table


def test_a_change_of_means_over_different_answers_is_marked():
    whole = {"sampled/reward": 0.5, "sampled/num_answers": 6.0, "sampled/num_scored": 6.0}
    part = whole | {"sampled/num_scored": 2.0}
    assert validation_table([line(0, whole), line(1, part)]).count("different answers") == 1
    assert "different answers" not in validation_table([line(0, whole), line(1, whole)])

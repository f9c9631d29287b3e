"""Metrics read back, from runs in any state, and their running mean."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.report import metrics_file
from mega_agentrl.report.metrics_file import parse_metrics, read_metrics, running_mean

LINES = [
    '{"stage": "sft", "step": 1, "loss": 2.0}',
    '{"stage": "rl", "step": 2, "a": 2.0, "b": 1}',
    '{"stage": "rl", "step": 1, "a": 1.0, "late": 5}',
    '{"stage": "held_out_before", "step": 0, "sampled/reward": 0.3}',
]


def test_series_by_stage_in_order_of_steps():
    log = parse_metrics(LINES)
    assert log.series("rl", "a") == [(1, 1.0), (2, 2.0)]
    assert log.series("rl", "b") == [(2, 1.0)]
    assert log.series("sft", "loss") == [(1, 2.0)]
    assert log.series("rl", "nothing") == []
    assert log.metric_names("rl") == ["a", "late", "b"]
    assert [line.stage for line in log.validation_lines()] == ["held_out_before"]


def test_the_last_line_of_a_repeated_step_counts():
    log = parse_metrics([*LINES, '{"stage": "rl", "step": 2, "a": 9.0}'])
    assert log.series("rl", "a") == [(1, 1.0), (2, 9.0)]
    assert log.series("rl", "b") == []


def test_values_that_are_not_finite_are_kept():
    text = json.dumps({"stage": "rl", "step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})
    log = parse_metrics([text])
    assert math.isnan(log.series("rl", "a")[0][1])
    assert [log.series("rl", name)[0][1] for name in "bc"] == [math.inf, -math.inf]


def test_values_that_are_no_numbers_are_left_out():
    text = '{"stage": "rl", "step": 1, "a": 1, "text": "x", "flag": true, "none": null, "l": [1]}'
    assert parse_metrics([text]).metric_names("rl") == ["a"]


def test_lines_that_cannot_be_read_are_counted():
    log = parse_metrics([*LINES, "[1]", '{"stage": "rl"}', b"\xff\n", "\n", '{"stage": "rl", "st'])
    assert len(log.lines) == 4
    assert log.num_unreadable_lines == 4


@pytest.mark.parametrize("step", ["true", "-1", "1e3", "9" * 30], ids=["bool", "sign", "e", "big"])
def test_steps_that_no_run_has_are_not_read(step):
    assert parse_metrics([f'{{"stage": "rl", "step": {step}}}']).num_unreadable_lines == 1


def test_lines_that_would_stop_a_reader_are_counted_or_infinite():
    digits = "9" * 400
    log = parse_metrics(
        ["[" * 100_000, f'{{"stage": "rl", "step": 1, "a": {digits}, "b": -{digits}}}']
    )
    assert log.num_unreadable_lines == 1
    assert [log.series("rl", name)[0][1] for name in "ab"] == [math.inf, -math.inf]


def test_a_line_without_an_end_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "MAX_LINE_BYTES", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(LINES[0].encode() + b"\n" + b"x" * 950)
    log = read_metrics(path)
    assert (len(log.lines), log.num_unreadable_lines) == (1, 10)


def test_a_missing_file_has_no_lines_and_others_are_read(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl").lines == ()
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES))
    assert read_metrics(path).series("rl", "a") == [(1, 1.0), (2, 2.0)]


def test_a_running_mean_is_over_the_last_values():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, 3.0], 10) == [1.0, 2.0]
    assert running_mean([], 3) == []


def test_a_nan_stays_within_its_windows():
    means = running_mean([1.0, math.nan, 3.0, 5.0], 2)
    assert [math.isnan(mean) for mean in means] == [False, True, True, False]
    assert means[-1] == 4.0


@given(st.lists(st.floats(-10, 10), max_size=40), st.integers(1, 12))
def test_running_mean_stays_between_the_values_it_averages(values, window):
    for index, mean in enumerate(running_mean(values, window)):
        seen = values[max(0, index - window + 1) : index + 1]
        assert min(seen) - 1e-9 <= mean <= max(seen) + 1e-9


def test_running_mean_needs_a_window():
    with pytest.raises(InputError) as caught:
        running_mean([1.0], 0)
    assert caught.value.got == 0

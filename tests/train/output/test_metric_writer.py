"""The metric file and the phase clock."""

import json
import time

import pytest

from mega_agentrl.train.output.metric_writer import MetricWriter, PhaseTimer


def test_lines_keep_stage_step_and_values(tmp_path):
    writer = MetricWriter(tmp_path / "new")
    writer.write("rl", 1, {"a": 0.5})
    writer.write("rl", 2, {"a": float("nan")})
    writer.close()
    first, second = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first) == {"stage": "rl", "step": 1, "a": 0.5}
    assert json.loads(second)["a"] != json.loads(second)["a"]


def test_a_second_writer_appends(tmp_path):
    for step in (1, 2):
        writer = MetricWriter(tmp_path)
        writer.write("rl", step, {})
        writer.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_trackers_get_the_numbers_and_the_file_the_words_too(tmp_path):
    class Tracker:
        def log(self, stage, step, numbers):
            self.said = (stage, step, numbers)

    trackers = [Tracker(), Tracker()]
    writer = MetricWriter(tmp_path, trackers)
    writer.write("rl", 1, {"a": 0.5, "gpu/worst": "node-3"})
    writer.close()
    assert [one.said for one in trackers] == [("rl", 1, {"a": 0.5})] * 2
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["gpu/worst"] == "node-3"


def test_clock_adds_up_by_phase_and_starts_over(monkeypatch):
    times = iter([0.0, 1.5, 2.0, 4.0, 8.0, 8.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = PhaseTimer()
    for _ in range(2):
        with clock.phase("rollout"):
            pass
    with clock.phase("update"):
        pass
    assert list(clock.pop_seconds().items()) == [("rollout", 3.5), ("update", 0.25)]
    assert clock.pop_seconds() == {}


def test_clock_counts_a_phase_that_fails():
    clock = PhaseTimer()
    with pytest.raises(ZeroDivisionError), clock.phase("sync"):
        assert 1 / 0
    assert "sync" in clock.pop_seconds()

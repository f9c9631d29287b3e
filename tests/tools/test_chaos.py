"""What the chaos check plans, finds and compares; the runs themselves are in `tests/e2e`."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest

from tools.chaos import main
from tools.chaos_parts.outcome import RunOutcome, differences, read_outcome
from tools.chaos_parts.processes import RUN_ENV_VAR, ProcessTracker
from tools.chaos_parts.run import KINDS, RunHistory, plan_kills, rl_steps

pytestmark = pytest.mark.extended

OUTCOME = RunOutcome(
    prompts=(("a", "b"), ("c", "d")), losses=(0.5, 0.25), num_failed=(0, 0), lines=()
)


def test_kills_are_drawn_evenly_over_kinds_and_ordered_by_step():
    spans = [60.0, *range(1, 8)]
    plan = plan_kills(20, spans, random.Random(1))
    assert Counter(kill.kind for kill in plan) == dict.fromkeys(KINDS, 5)
    assert [kill.step for kill in plan] == sorted(kill.step for kill in plan)
    assert {kill.step for kill in plan} <= set(range(8))
    assert all(kill.delay_s < spans[kill.step] for kill in plan)
    assert any(kill.delay_s > spans[kill.step] / 2 for kill in plan)
    assert plan == plan_kills(20, spans, random.Random(1))
    assert plan != plan_kills(20, spans, random.Random(2))


def test_spans_are_the_durations_of_steps(tmp_path):
    history = RunHistory(tmp_path, step_times_s={0: 0.1, 1: 60.0, 2: 66.0, 3: 70.0})
    assert history.step_durations_s() == [60.0, 6.0, 4.0]


def test_other_prompts_or_losses_are_differences():
    assert differences(OUTCOME, OUTCOME) == []
    assert differences(OUTCOME, replace(OUTCOME, losses=(0.5, 0.25 + 1e-7))) == []
    (wrong,) = differences(OUTCOME, replace(OUTCOME, losses=(0.5, 0.26)))
    assert "step 2" in wrong
    assert differences(OUTCOME, replace(OUTCOME, losses=(0.5, float("nan"))))
    for prompts in ((("a", "b"), ("d", "c")), (("a", "b"),), (("a", "b"), ("c", "d"), ("e",))):
        (wrong,) = differences(OUTCOME, replace(OUTCOME, prompts=prompts))
        assert "first difference is in step" in wrong


def test_losses_are_compared_up_to_the_first_failed_trajectory():
    failed = replace(OUTCOME, losses=(0.5, 0.9), num_failed=(0, 1))
    assert differences(OUTCOME, failed) == []
    assert differences(OUTCOME, replace(failed, losses=(0.4, 0.9)))


def test_times_and_memory_of_two_runs_may_differ(tmp_path):
    line = {"stage": "sft", "step": 1, "loss": 0.5}
    measured = {"time/update_s": 1, "memory/engine_peak_mib": 2, "driver/rss_mib": 900}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | measured) + "\n")
    assert read_outcome(tmp_path).lines == (line,)


def test_a_tracker_finds_children_with_other_environments_and_orphans(tmp_path):
    child = "import subprocess, sys; subprocess.Popen(['sleep', '60'], env={}); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", child],
        env=os.environ | {RUN_ENV_VAR: str(tmp_path)},
        stdin=subprocess.PIPE,
    )
    tracker, other = ProcessTracker(str(tmp_path)), ProcessTracker("other")
    try:
        ends_at = time.monotonic() + 240
        while not any(words == "sleep 60" for words in tracker.scan().values()):
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        assert other.scan() == {}
        parent.kill()
        parent.wait()
        assert len(tracker.scan()) == 1
        assert ProcessTracker(str(tmp_path)).scan() == {}, (
            "a tracker that starts too late cannot find it"
        )
    finally:
        parent.kill()
        for pid in tracker.scan():
            os.kill(pid, 9)


def test_a_line_that_is_being_written_is_no_step(tmp_path):
    assert rl_steps(tmp_path) == 0
    lines = [{"stage": "sft", "step": 60}, {"stage": "rl", "step": 1}, {"stage": "rl", "step": 2}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"stage": "rl", "st')
    assert rl_steps(tmp_path) == 2


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--kills", "1", "--runs", "2"]])
def test_a_run_without_a_kill_is_refused(arguments):
    assert main(arguments) == 2

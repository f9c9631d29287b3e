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
from tools.chaos_parts.processes import MARK, Family
from tools.chaos_parts.run import KINDS, Story, make_plan, rl_steps
from tools.chaos_parts.verdict import Outcome, differences, read_outcome

OUTCOME = Outcome(prompts=(("a", "b"), ("c", "d")), losses=(0.5, 0.25), num_failed=(0, 0), lines=())


def test_a_plan_hits_all_kinds_alike_in_the_order_of_steps():
    spans = [60.0, *range(1, 8)]
    plan = make_plan(20, spans, random.Random(1))
    assert Counter(blow.kind for blow in plan) == dict.fromkeys(KINDS, 5)
    assert [blow.step for blow in plan] == sorted(blow.step for blow in plan)
    assert {blow.step for blow in plan} <= set(range(8))
    assert all(blow.delay_s < spans[blow.step] for blow in plan)
    assert any(blow.delay_s > spans[blow.step] / 2 for blow in plan)
    assert plan == make_plan(20, spans, random.Random(1))
    assert plan != make_plan(20, spans, random.Random(2))


def test_spans_are_the_times_between_steps(tmp_path):
    story = Story(tmp_path, reached={0: 0.1, 1: 60.0, 2: 66.0, 3: 70.0})
    assert story.spans() == [60.0, 6.0, 4.0]


def test_prompts_and_losses_are_compared():
    assert differences(OUTCOME, OUTCOME) == []
    assert differences(OUTCOME, replace(OUTCOME, losses=(0.5, 0.25 + 1e-7))) == []
    (wrong,) = differences(OUTCOME, replace(OUTCOME, losses=(0.5, 0.26)))
    assert "step 2" in wrong
    assert differences(OUTCOME, replace(OUTCOME, losses=(0.5, float("nan"))))
    for prompts in ((("a", "b"), ("d", "c")), (("a", "b"),), (("a", "b"), ("c", "d"), ("e",))):
        (wrong,) = differences(OUTCOME, replace(OUTCOME, prompts=prompts))
        assert "first to differ is step" in wrong


def test_losses_count_up_to_the_first_failed_trajectory():
    failed = replace(OUTCOME, losses=(0.5, 0.9), num_failed=(0, 1))
    assert differences(OUTCOME, failed) == []
    assert differences(OUTCOME, replace(failed, losses=(0.4, 0.9)))


def test_times_and_memory_of_two_runs_may_differ(tmp_path):
    line = {"stage": "sft", "step": 1, "loss": 0.5, "time/update_s": 1, "memory/engine_peak_mib": 2}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert read_outcome(tmp_path).lines == ({"stage": "sft", "step": 1, "loss": 0.5},)


def test_a_family_has_children_with_other_environments_and_orphans(tmp_path):
    child = "import subprocess, sys; subprocess.Popen(['sleep', '60'], env={}); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", child], env=os.environ | {MARK: str(tmp_path)}, stdin=subprocess.PIPE
    )
    family, other = Family(str(tmp_path)), Family("other")
    try:
        ends_at = time.monotonic() + 30
        while not any(words == "sleep 60" for words in family.look().values()):
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        assert other.look() == {}
        parent.kill()
        parent.wait()
        assert len(family.look()) == 1
        assert Family(str(tmp_path)).look() == {}, "who looks too late does not know it"
    finally:
        parent.kill()
        for pid in family.look():
            os.kill(pid, 9)


def test_steps_are_read_off_whole_lines(tmp_path):
    assert rl_steps(tmp_path) == 0
    lines = [{"stage": "sft", "step": 60}, {"stage": "rl", "step": 1}, {"stage": "rl", "step": 2}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"stage": "rl", "st')
    assert rl_steps(tmp_path) == 2


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--kills", "1", "--runs", "2"]])
def test_too_few_kills_are_refused(arguments, capsys):
    assert main(arguments) == 2
    assert "a kill for each" in capsys.readouterr().err

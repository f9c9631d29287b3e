"""The red banner: which share failed, and why the first one did."""

from __future__ import annotations

import json

from mega_agentrl.report.metrics_file import FIRST_FAILURE_METRIC, parse_metrics
from mega_agentrl.report.page.failure_banner import failure_lines
from mega_agentrl.report.page.render import ReportPage, render_page
from tests.report.pages import PageReader


def step(number, failed, reason=None):
    line = {"stage": "rl", "step": number, "rollout/num_trajectories": 100}
    line["rollout/failed_fraction"] = failed
    return line if reason is None else line | {FIRST_FAILURE_METRIC: reason}


def held_out(num_scored, reason="slow"):
    line = {"stage": "held_out_before", "step": 0, "sampled/reward": 1.0}
    line |= {"sampled/num_answers": 6, "sampled/num_scored": num_scored}
    return line | {FIRST_FAILURE_METRIC: reason}


def log_of(*lines):
    return parse_metrics(json.dumps(line) for line in lines)


def test_training_adds_up_and_each_evaluation_has_a_line():
    lines = failure_lines(log_of(held_out(2), step(1, 0.25, "notes: <b>"), step(2, 0.5, "later")))
    assert len(lines) == 2
    assert "75 of 200" in lines[0] and "notes: <b>" in lines[0]
    assert "4 of 6" in lines[1] and "slow" in lines[1]


def test_healthy_runs_have_no_banner():
    healthy = log_of(held_out(6), step(1, 0.0), step(2, 0.01, "one abort"))
    assert failure_lines(healthy) == []
    page = PageReader(render_page(ReportPage(title="run", subtitle="", log=healthy)))
    assert not [one for one in page.all("div") if one.get("id") == "failures"]


def test_the_page_of_a_failed_run_begins_with_its_error_escaped():
    log = log_of(step(1, 0.5, "<b>bold</b>"))
    markup = render_page(ReportPage(title="run", subtitle="", log=log, failure="<i>stopped</i>"))
    (banner,) = [one for one in PageReader(markup).all("div") if one.get("id") == "failures"]
    assert banner["role"] == "alert"
    assert "&lt;i&gt;stopped" in markup and "<i>" not in markup and "<b>bold" not in markup
    assert markup.index("stopped") < markup.index('class="tiles"')

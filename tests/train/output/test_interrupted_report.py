"""The page of a run that ended early: written, bounded in time, and never in the way."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mega_agentrl.train.output import interrupted_report
from mega_agentrl.train.output.interrupted_report import write_interrupted_report


@pytest.fixture
def run_dir(tmp_path):
    line = {"stage": "rl", "step": 1, "rollout/reward_unfiltered": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


@pytest.fixture
def slow(monkeypatch):
    """A page that takes a minute, made by code that gives up at no error."""

    def endless(run_dir):
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            with suppress(Exception):
                time.sleep(60)

    monkeypatch.setattr(interrupted_report, "write_report", endless)


def test_what_there_is_by_then_is_on_the_page(run_dir):
    before = signal.getsignal(signal.SIGALRM)
    assert write_interrupted_report(run_dir, deadline_s=60)
    assert "<html" in (run_dir / "report.html").read_text()
    assert not list(run_dir.glob(".*partial"))
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_from_another_thread_too(run_dir):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(write_interrupted_report(run_dir, deadline_s=60))
    )
    thread.start()
    thread.join(60)
    assert found == [True] and (run_dir / "report.html").is_file()


def test_a_page_that_cannot_be_written_is_a_line_in_the_log(tmp_path, caplog):
    (tmp_path / "report.html").write_text("the one before")
    assert not write_interrupted_report(tmp_path, deadline_s=60)
    assert "no report page" in caplog.text and "no metrics.jsonl" in caplog.text
    assert (tmp_path / "report.html").read_text() == "the one before"


@pytest.mark.parametrize("error", [OSError(28, "No space left"), MemoryError(), KeyError("x")])
def test_no_error_of_the_page_is_raised(run_dir, monkeypatch, caplog, error):
    def fails(run_dir):
        raise error

    monkeypatch.setattr(interrupted_report, "write_report", fails)
    assert not write_interrupted_report(Path(run_dir), deadline_s=60)
    assert type(error).__name__ in caplog.text


def test_a_page_that_takes_too_long_is_given_up(run_dir, slow, caplog):
    assert not write_interrupted_report(run_dir, deadline_s=0.2)
    assert "not written within 0.2 s" in caplog.text


def test_ctrl_c_ends_the_page_and_nothing_else(run_dir, monkeypatch, caplog):
    def interrupted(run_dir):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(interrupted_report, "write_report", interrupted)
    assert not write_interrupted_report(run_dir, deadline_s=60)
    assert "interrupted while it was written" in caplog.text

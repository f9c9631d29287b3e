"""The meter of CPU seconds: children count, and a test or a run over its limit fails the run."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import cpu_time
from tests.cpu_time import (
    EXPENSIVE,
    MAX_TEST_S,
    MEASURE_PACE_EVERY_S,
    REFERENCE_S,
    CpuReport,
    Pace,
    processor_s,
)

ROOT = Path(__file__).parents[1]
BURN = "import os\nwhile sum(os.times()[:2]) < 0.5: pass\nprint(flush=True)\ninput()"
WITH_A_CHILD = """
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE) as child:
    input()
    child.communicate(b"\\n")
print("reaped", flush=True)
input()
"""


def test_the_seconds_of_a_child_count_while_it_lives_and_when_it_has_ended():
    # Not measured below this process, whose other children may end at the same time.
    command = [sys.executable, "-c", WITH_A_CHILD, BURN]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        parent.stdout.readline()
        foreign = set()
        assert processor_s(parent.pid, foreign) > 0.45
        assert os.getpid() in foreign
        assert parent.pid not in foreign
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.stdout.readline()
        assert processor_s(parent.pid, foreign) > 0.45
    finally:
        parent.kill()
        parent.communicate(timeout=300)


def reported(budget_s, pace=1.0, **seconds_by_test):
    report = CpuReport(budget_s)
    for test, seconds in seconds_by_test.items():
        properties = [("pace", pace), ("cpu_s", seconds), ("fixture ranks (tests)", 2.0)]
        teardown = SimpleNamespace(when="teardown", nodeid=test, user_properties=properties)
        report.pytest_runtest_logreport(teardown)
    return report


def test_fixtures_count_for_the_run_but_not_for_the_test_that_needs_them_first():
    report = reported(10.0, first=MAX_TEST_S, second=0.5)
    assert report.total_s == MAX_TEST_S + 0.5 + 2 * 2.0
    assert report.problems() == []


def test_seconds_of_a_core_at_half_the_pace_count_half():
    report = reported(10.0, pace=0.5, first=2 * MAX_TEST_S, second=1.0)
    assert report.total_s == MAX_TEST_S + 0.5 + 2.0
    assert report.measured_s == 2 * MAX_TEST_S + 1.0 + 2 * 2.0
    assert report.problems() == []


def test_the_pace_is_that_of_the_fixed_work_and_measured_again_when_it_is_old(monkeypatch):
    clock = SimpleNamespace(monotonic=0.0, thread_time=0.0)
    durations = iter([REFERENCE_S, 2 * REFERENCE_S, 4 * REFERENCE_S, REFERENCE_S])

    def fixed_work():
        clock.thread_time += next(durations)

    monkeypatch.setattr(cpu_time.time, "monotonic", lambda: clock.monotonic)
    monkeypatch.setattr(cpu_time.time, "thread_time", lambda: clock.thread_time)
    monkeypatch.setattr(cpu_time, "fixed_work", fixed_work)
    pace, paces = Pace(), []
    for clock.monotonic in [0.0, 0.9 * MEASURE_PACE_EVERY_S, 11.0, 22.0, 33.0]:
        paces.append(round(pace(), 6))
    assert paces == [1.0, 1.0, 0.75, 0.5, 0.5]  # medians of 1; 1, 1/2; 1, 1/2, 1/4; 1/2, 1/4, 1


@pytest.mark.parametrize(
    ("budget_s", "second_s", "num_problems"),
    [(100.0, MAX_TEST_S + 0.1, 1), (8.9, 1.0, 1), (8.9, MAX_TEST_S + 0.1, 2), (None, 900.0, 0)],
    ids=["a_test_over_its_limit", "the_run_over_its_budget", "both", "no_budget"],
)
def test_what_is_too_expensive_is_named(budget_s, second_s, num_problems):
    problems = reported(budget_s, first=4.0, second=second_s).problems()
    assert len(problems) == num_problems
    assert any(problem.startswith("second:") for problem in problems) == (
        budget_s is not None and second_s > MAX_TEST_S
    )


@pytest.mark.parametrize("name", EXPENSIVE)
def test_every_name_on_the_list_is_that_of_a_test(name):
    path, start = name.split("::")
    assert f"def {start}" in (ROOT / path).read_text()


def test_a_green_run_that_is_too_expensive_fails():
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    reported(1.0, first=4.0).pytest_sessionfinish(session, session.exitstatus)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED

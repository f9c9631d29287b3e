"""The meter of CPU seconds: children count, and a test or a run over its limit fails the run."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.cpu_time import MAX_TEST_S, CpuReport, processor_s

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
        parent.communicate(timeout=60)


def reported(budget_s, **seconds_by_test):
    report = CpuReport(budget_s)
    for test, seconds in seconds_by_test.items():
        properties = [("cpu_s", seconds), ("fixture ranks (tests)", 2.0)]
        teardown = SimpleNamespace(when="teardown", nodeid=test, user_properties=properties)
        report.pytest_runtest_logreport(teardown)
    return report


def test_fixtures_count_for_the_run_but_not_for_the_test_that_needs_them_first():
    report = reported(10.0, first=MAX_TEST_S, second=0.5)
    assert report.total_s == MAX_TEST_S + 0.5 + 2 * 2.0
    assert report.problems() == []


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


def test_a_green_run_that_is_too_expensive_fails():
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    reported(1.0, first=4.0).pytest_sessionfinish(session, session.exitstatus)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED

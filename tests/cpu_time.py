"""CPU seconds of each test, its children included, and the budget that `make test` keeps.

The clock says how busy the machine is; CPU seconds say what a test costs. With `--cpu-budget-s` the
run fails if all tests together use more, or if one test uses more than `MAX_TEST_S` and is not in
`EXPENSIVE`. A fixture of a wider scope than a function is counted under its own name, not under
the test that happens to need it first.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict

import pytest

MAX_TEST_S = 5.0
NUM_SHOWN = 25
SCAN_AFTER_S = 0.1
"""Shorter tests and fixtures leave the work of living children to the next longer one."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

EXPENSIVE = {
    "tests/parallel/test_grid.py::test_a_layout_scores_like_transformers": "up to eight ranks",
    "tests/actor/model/test_tree_attention.py::test_kernels_in_the_inter": "Triton's interpreter",
    "tests/generator/test_live_engine.py::test_a_held_request_goes_on": "an engine at work",
    "tests/generator/test_live_engine.py::test_a_greedy_request_that_is_held": "an engine at work",
}
"""Why a test may use more than `MAX_TEST_S`, by the start of its id.

The list has tests that were above it, and those of 3.6 s and more: the same test of ranks has used
twice as much in the next run.
"""


def processor_s(root: int, foreign: set[int] | None = None) -> float:
    """Return the CPU seconds of `root` and its descendants, of dead ones once they are reaped.

    Args:
        root: Id of a process.
        foreign: Processes that earlier calls have found elsewhere, which saves reading them; they
            are those of this call afterwards.
    """
    foreign = set() if foreign is None else foreign
    alive = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    foreign &= alive
    ticks, children = {}, defaultdict(list)
    for pid in alive - foreign:
        try:
            with open(f"/proc/{pid}/stat") as file:
                stat = file.read()
        except OSError:
            continue  # has ended since it was listed
        fields = stat[stat.rindex(")") + 2 :].split()
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system, own and of reaped children
    total, todo, own = 0, [root], set()
    while todo:
        pid = todo.pop()
        own.add(pid)
        total += ticks.get(pid, 0)
        todo += children[pid]
    foreign |= ticks.keys() - own
    return total / TICKS_PER_S


class CpuMeter:
    """Measures tests in the process that runs them; results travel with the tests' reports."""

    def __init__(self) -> None:
        self._fixtures_s: dict[str, float] = {}
        self._own_s = _own_s()
        self._foreign: set[int] = set()
        self._children_s = processor_s(os.getpid(), self._foreign) - self._own_s
        self._nested_s = 0.0

    def _lap_s(self, *, scan: bool) -> float:
        """Return the CPU seconds since the last call."""
        own_s = _own_s()
        lap_s, self._own_s = own_s - self._own_s, own_s
        if scan:
            children_s = processor_s(os.getpid(), self._foreign) - own_s
            # The seconds of a child that nobody below `root` reaps are lost: never negative.
            lap_s += max(0.0, children_s - self._children_s)
            self._children_s = children_s
        return lap_s

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        """Count a fixture of a wider scope under its own name."""
        if fixturedef.scope == "function":
            return (yield)
        self._nested_s += self._lap_s(scan=False)
        start_s = time.monotonic()
        try:
            return (yield)
        finally:
            name = f"fixture {fixturedef.argname} ({fixturedef.baseid})"
            seconds = self._lap_s(scan=time.monotonic() - start_s > SCAN_AFTER_S)
            self._fixtures_s[name] = self._fixtures_s.get(name, 0.0) + seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Start a test's account."""
        self._lap_s(scan=False)
        self._nested_s, self._start_s = 0.0, time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item, nextitem):
        """Close the account, after the test's own fixtures and those of wider scope have ended."""
        try:
            return (yield)
        finally:
            lap_s = self._lap_s(scan=time.monotonic() - self._start_s > SCAN_AFTER_S)
            item.user_properties.append(("cpu_s", self._nested_s + lap_s))
            for name, seconds in self._fixtures_s.items():
                item.user_properties.append((name, seconds))
            self._fixtures_s.clear()


def _own_s() -> float:
    times = os.times()
    return times.user + times.system


class CpuReport:
    """Adds up and judges in the process that prints the results."""

    def __init__(self, budget_s: float | None) -> None:
        self.budget_s = budget_s
        self.tests_s: dict[str, float] = {}
        self.fixtures_s: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report):
        """Read what the meter has noted."""
        if report.when != "teardown":
            return
        for name, seconds in report.user_properties:
            if name == "cpu_s":
                self.tests_s[report.nodeid] = seconds
            elif name.startswith("fixture "):
                self.fixtures_s[name] += seconds

    def problems(self) -> list[str]:
        """Return why the run is too expensive, if it is."""
        if self.budget_s is None:
            return []
        found = [
            f"{test}: {seconds:.1f} CPU seconds, at most {MAX_TEST_S:g}"
            for test, seconds in self.tests_s.items()
            if seconds > MAX_TEST_S and not test.startswith(tuple(EXPENSIVE))
        ]
        if self.total_s > self.budget_s:
            found.append(f"all tests: {self.total_s:.0f} CPU seconds, at most {self.budget_s:g}")
        return found

    @property
    def total_s(self) -> float:
        """CPU seconds of all tests and fixtures."""
        return sum(self.tests_s.values()) + sum(self.fixtures_s.values())

    def pytest_terminal_summary(self, terminalreporter):
        """Print what is most expensive, and why the run fails."""
        if not self.tests_s:
            return
        budget = "" if self.budget_s is None else f" of {self.budget_s:g}"
        terminalreporter.section("CPU seconds")
        terminalreporter.line(f"{self.total_s:.0f}{budget} in tests and their fixtures; the most:")
        by_name = self.tests_s | self.fixtures_s
        for name in sorted(by_name, key=by_name.__getitem__, reverse=True)[:NUM_SHOWN]:
            terminalreporter.line(f"{by_name[name]:8.1f}  {name}")
        for problem in self.problems():
            terminalreporter.line(f"too expensive: {problem}", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        """Fail a run that is green otherwise."""
        if exitstatus == pytest.ExitCode.OK and self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""CPU seconds of each test, its children included, and the budget that `make test` keeps.

The clock says how busy the machine is; CPU seconds say what a test costs. A core that shares its
parts with a busy one takes up to twice the CPU seconds for the same work, so fixed work is timed
between the tests, and seconds are those of a core that needs `REFERENCE_S` for it. With
`--cpu-budget-s` the run fails if all tests together use more, or if one test uses more than
`MAX_TEST_S` and is not in `EXPENSIVE`. A fixture of a wider scope than a function is counted under
its own name, not under the test that happens to need it first.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict

import pytest

MAX_TEST_S = 5.0
NUM_SHOWN = 25
SCAN_AFTER_S = 0.1
"""Shorter tests and fixtures leave the work of living children to the next longer one."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
REFERENCE_S = 0.040
"""CPU seconds of `fixed_work` on the machine of BENCHMARKS, whose cores took 0.026 to 0.050."""
MEASURE_PACE_EVERY_S = 10.0
NUM_PACES = 3
"""The pace is the median of so many last measurements."""

EXPENSIVE = {
    "tests/parallel/test_grid.py::test_a_layout_scores_like_transformers": "up to eight ranks",
    "tests/actor/checkpoint/test_save_load.py::test_a_": "ranks that are killed or start anew",
    "tests/actor/model/test_tree_attention.py::test_the_kernels_pass": "Triton's interpreter",
    "tests/actor/model/test_vision_model.py::test_log_probs_and_gradients": "ranks, transformers",
    "tests/data/encoding/test_parallel_encode.py::test_several_processes": "new processes",
    "tests/e2e/test_command_line.py::test_a_sweep_goes_on": "whole runs in processes",
    "tests/generator/test_live_engine.py::test_": "an engine at work, which polls while it waits",
    "tests/runtime/test_cluster.py::test_workers_have_the_priority": "a Ray of its own",
    "tests/runtime/workers/test_engine_supervisor.py::test_requests_of_a": "Ray starts processes",
    "tests/runtime/workers/test_generator_group.py::test_prompt_stays": "Ray starts processes",
    "tests/slurm/test_node_probes.py::test_import_check": "imports all packages in a new process",
    "tests/tool/browse/test_browse_tool.py::test_an_html_page": "the first worker, which imports",
}
"""Why a test may use more than `MAX_TEST_S`, by the start of its id.

The list has tests that were above it, and those of 3.6 s and more: the same test has used twice as
much in the next run, and in a new environment the first that imports a package also compiles it.
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


def fixed_work() -> None:
    """Do what tests do most, in Python and in the libraries below it, always the same."""
    rows = [{"name": f"row {i}", "values": [i * 3 % 7, i / 3]} for i in range(6000)]
    rows = json.loads(json.dumps(rows))
    rows.sort(key=lambda row: (row["values"][0], row["name"]))
    total = {row["name"]: sum(row["values"]) for row in rows}
    functions = (f"def f{i}(a, b=1):\n    return [a + b * {i}] * 3" for i in range(150))
    compile("\n".join(functions), f"{len(total)} rows", "exec")


class Pace:
    """How many of the reference's CPU seconds the work of one CPU second takes here and now."""

    def __init__(self) -> None:
        self._measured: list[float] = []
        self._last_s = -MEASURE_PACE_EVERY_S

    def __call__(self) -> float:
        """Return the pace, measured anew if the last measurement is old."""
        if time.monotonic() - self._last_s >= MEASURE_PACE_EVERY_S:
            start_s = time.thread_time()
            fixed_work()
            self._measured.append(REFERENCE_S / (time.thread_time() - start_s))
            self._last_s = time.monotonic()
        return statistics.median(self._measured[-NUM_PACES:])


class CpuMeter:
    """Measures tests in the process that runs them; results travel with the tests' reports."""

    def __init__(self) -> None:
        self._fixtures_s: dict[str, float] = {}
        self._pace = Pace()
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
            item.user_properties.append(("pace", self._pace()))
            item.user_properties.append(("cpu_s", self._nested_s + lap_s))
            item.user_properties.extend(self._fixtures_s.items())
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
        self.measured_s = 0.0

    def pytest_runtest_logreport(self, report):
        """Read what the meter has noted."""
        if report.when != "teardown":
            return
        pace = dict(report.user_properties).get("pace", 1.0)
        for name, seconds in report.user_properties:
            if name == "cpu_s":
                self.tests_s[report.nodeid] = pace * seconds
            elif name.startswith("fixture "):
                self.fixtures_s[name] += pace * seconds
            else:
                continue
            self.measured_s += seconds

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
        terminalreporter.line(
            f"{self.total_s:.0f}{budget} in tests and their fixtures, {self.measured_s:.0f} as "
            "measured on this machine; the most:"
        )
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

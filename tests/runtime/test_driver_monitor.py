"""The driver's metrics are peaks of the step, and each limit that is near is one line."""

import logging
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from mega_agentrl.report.terminal_warnings import TerminalWarnings
from mega_agentrl.rollout.gateway.server import Gateway
from mega_agentrl.runtime import driver_monitor as module
from mega_agentrl.runtime.driver_monitor import DriverMonitor, gateway_metrics
from mega_agentrl.runtime.remote_calls import RAY_MEMORY_KILLS


class Memory:
    """A memory watch that reports one line for each process that Ray killed."""

    fraction, num_kills = 0.5, 0

    def check(self, ray_kills):
        return [f"killed {name}" for name in ray_kills]


class Remote:
    """The watches of other machines."""

    num_kills = 0

    def __init__(self):
        self.lines = []

    def check(self):
        lines, self.lines = self.lines, []
        return lines


@pytest.fixture(autouse=True)
def no_kills():
    while not RAY_MEMORY_KILLS.empty():
        RAY_MEMORY_KILLS.get()


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == module.__name__]


def test_metrics_are_peaks_since_the_last_step():
    gateway = {"gateway/held_mib": 1.0}
    pauses = iter([2.5, 0.0])
    loop = SimpleNamespace(pop_longest_pause=lambda: next(pauses))
    memory = Memory()
    monitor = DriverMonitor({"loop": loop}, memory, lambda: gateway)
    monitor.look()
    opened = [open(os.devnull) for _ in range(20)]
    gateway["gateway/held_mib"], memory.fraction, memory.num_kills = 9.0, 0.7, 2
    monitor.look()
    for file in opened:
        file.close()
    gateway["gateway/held_mib"] = memory.fraction = 0.25
    first = monitor.collect()
    second = monitor.collect()
    assert first["gateway/held_mib"] == 9.0 and second["gateway/held_mib"] == 0.25
    assert first["driver/memory_fraction"] == 0.7 and second["driver/memory_fraction"] == 0.25
    assert first["driver/open_files_max"] == second["driver/open_files_max"] + 20
    assert first["driver/loop_pause_max_s"] == 2.5 and second["driver/loop_pause_max_s"] == 0.0
    assert first["driver/oom_kills"] == 2 and second["driver/oom_kills"] == 0
    assert first["driver/rss_growth_mib"] == 0.0
    growth_mib = second["driver/rss_mib"] - first["driver/rss_mib"]
    assert second["driver/rss_growth_mib"] == growth_mib
    assert second["driver/num_threads_max"] >= 1


def test_descriptors_near_the_limit_are_one_line(caplog, monkeypatch):
    monitor = DriverMonitor({}, Memory())
    num_open = monitor.collect()["driver/open_files_max"]
    limit = int(num_open / 0.85)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with caplog.at_level(logging.WARNING):
        fraction = monitor.collect()["driver/open_files_fraction"]
        monitor.look()
    assert 0.8 <= fraction <= 1.0
    (line,) = lines_of(caplog)
    assert f"{num_open:.0f} open descriptors" in line and "ulimit -n" in line


def test_driver_without_a_free_descriptor_goes_on_with_one_line(caplog, monkeypatch):
    def fail(_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module.os, "listdir", fail)
    monitor = DriverMonitor({}, Memory())
    with caplog.at_level(logging.WARNING):
        assert "driver/oom_kills" in monitor.collect()
        monitor.collect()
    (line,) = lines_of(caplog)
    assert "Too many open files" in line


def test_lines_of_this_and_of_other_machines_are_logged_up_to_the_end(caplog):
    remote = Remote()
    with caplog.at_level(logging.WARNING), DriverMonitor({}, Memory(), None, remote):
        RAY_MEMORY_KILLS.put("engine 0")
        remote.lines = ["killed on another machine"]
    assert lines_of(caplog) == ["killed engine 0", "killed on another machine"]


def test_every_line_reaches_the_terminal_however_soon_it_follows_another(capsys):
    logger, handler = logging.getLogger(module.__name__), TerminalWarnings()
    logger.addHandler(handler)
    try:
        for name in ("engine 0", "95 % of policy rank 1"):
            RAY_MEMORY_KILLS.put(name)
            DriverMonitor({}, Memory()).look()
    finally:
        logger.removeHandler(handler)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["warning: killed engine 0", "warning: killed 95 % of policy rank 1"]


def test_gateways_use_has_a_metric():
    assert gateway_metrics(Gateway()) == {
        "gateway/held_mib": 0.0,
        "gateway/session_held_mib": 0.0,
        "gateway/in_flight_mib": 0.0,
        "gateway/num_connections": 0.0,
    }


def test_docs_name_every_metric():
    monitor = DriverMonitor({"loop": None, "agent_loop": None}, Memory())
    monitor._loops = dict.fromkeys(monitor._loops, SimpleNamespace(pop_longest_pause=lambda: 0.0))
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    for name in {**monitor.collect(), **gateway_metrics(Gateway())}:
        assert f"`{name}`" in text, name

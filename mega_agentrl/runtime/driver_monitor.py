"""Watches the driver: pauses of its event loops, memory, descriptors, threads, bytes of agents.

    driver/loop_pause_max_s         longest pause of the event loop of the rollouts in the step
    driver/agent_loop_pause_max_s   the same for the event loop of the agents
    driver/rss_mib                  most resident memory of the driver in the step
    driver/rss_growth_mib           difference to the step before
    driver/memory_fraction          share of the machine's or control group's memory in use, by all
    driver/open_files_max           most open descriptors in the step
    driver/open_files_fraction      the same as a share of the soft limit (`ulimit -n`)
    driver/num_threads_max          most threads in the step
    gateway/held_mib                most bytes that the gateway held for all agents' sessions
    gateway/session_held_mib        most bytes that it held for one of them
    gateway/in_flight_mib           most bytes of requests that were being read or answered
    gateway/num_connections         most open connections
    driver/oom_kills                processes that the kernels of the run's machines killed for
                                    memory in the step, those of others and in sandboxes included

A thread looks once a second, which takes less than a millisecond, and logs one line when a limit is
near or a process was killed for memory (`memory_watch`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import threading
from typing import TYPE_CHECKING, Protocol

from mega_agentrl.estimate.host_memory import ResidentMemory
from mega_agentrl.runtime.memory_watch import LimitAlarm, pop_all
from mega_agentrl.runtime.remote_calls import RAY_MEMORY_KILLS
from mega_agentrl.types.loop_watchdog import LoopWatchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.rollout.gateway.server import Gateway
    from mega_agentrl.runtime.event_loop_thread import EventLoopThread
    from mega_agentrl.runtime.memory_watch import MemoryWatch

LOOK_INTERVAL_S = 1.0
PAUSE_LIMIT_S = 1.0
"""Pause of the rollouts' loop from which the place where it stands is reported: streams of agents
and the timeouts of tools notice pauses of this length."""
OPEN_FILES_WARNING, OPEN_FILES_REARM = 0.8, 0.6
"""Share of the descriptors from which a line warns, and below which the next one may follow."""

_MIB = 2**20
_RAISE_FILES = (
    "Raise `ulimit -n`, or lower rollout.agent.max_concurrent or the number of workers of the tools"
)
_logger = logging.getLogger(__name__)


class RemoteWatches(Protocol):
    """The memory watches of the machines other than the driver's."""

    @property
    def num_kills(self) -> int:
        """Processes that the kernels have killed for memory so far."""

    def check(self) -> list[str]:
        """Return the lines that have come since the last call; never waits."""


class DriverMonitor:
    """`types.monitoring.DriverMonitor`; a context manager with a thread of its own.

    Args:
        loops: Watchdogs of event loops, by the beginning of their metric's name.
        memory: Watches this machine's memory.
        read_gateway: Returns the metrics of the gateway; None without an agent.
        remote: Watches the memory of the other machines; None if there are none.
    """

    def __init__(
        self,
        loops: Mapping[str, LoopWatchdog],
        memory: MemoryWatch,
        read_gateway: Callable[[], Mapping[str, float]] | None = None,
        remote: RemoteWatches | None = None,
    ) -> None:
        self._loops, self._memory = loops, memory
        self._read_gateway, self._remote = read_gateway, remote
        self._files_alarm = LimitAlarm(OPEN_FILES_WARNING, OPEN_FILES_REARM)
        self._peaks: dict[str, float] = {}
        self._last_rss_mib: float | None = None
        self._num_reported_kills = 0
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="driver-monitor", daemon=True)

    def __enter__(self) -> DriverMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing.set()
        self._thread.join()
        self.look()  # for a kill that ends the run

    def collect(self) -> dict[str, float]:
        """Return the metrics since the last call, which the module docstring lists."""
        self.look()
        with self._lock:
            metrics, self._peaks = self._peaks, {}
        if (rss_mib := metrics.get("driver/rss_mib")) is not None:
            before_mib, self._last_rss_mib = self._last_rss_mib, rss_mib
            metrics["driver/rss_growth_mib"] = 0.0 if before_mib is None else rss_mib - before_mib
        num_kills = self._memory.num_kills + (self._remote.num_kills if self._remote else 0)
        metrics["driver/oom_kills"] = float(num_kills - self._num_reported_kills)
        self._num_reported_kills = num_kills
        for name, watchdog in self._loops.items():
            metrics[f"driver/{name}_pause_max_s"] = watchdog.pop_longest_pause()
        return metrics

    def look(self) -> None:
        """Measure once, and log what has to be reported."""
        with self._lock:
            try:
                lines = self._look()
            except OSError as error:  # nothing of `/proc` opens without a free descriptor
                is_new = self._files_alarm.check(1.0)
                lines = [f"the driver cannot look at itself: {error}. {_RAISE_FILES}"] * is_new
        for line in lines:
            _logger.warning(line)  # its own template, so that the terminal omits none of them

    def _look(self) -> list[str]:
        """Measure once, and return the lines to report."""
        lines = []
        values = self._measure()
        if self._files_alarm.check(values["driver/open_files_fraction"]):
            lines.append(
                f"the driver has {values['driver/open_files_max']:.0f} open descriptors, "
                f"{values['driver/open_files_fraction']:.0%} of its limit; at the limit it can "
                f"neither open a file nor accept a connection. {_RAISE_FILES}"
            )
        lines += self._memory.check(pop_all(RAY_MEMORY_KILLS))
        lines += self._remote.check() if self._remote is not None else []
        values["driver/memory_fraction"] = self._memory.fraction
        for name, value in values.items():
            self._peaks[name] = max(value, self._peaks.get(name, 0.0))
        return lines

    def _measure(self) -> dict[str, float]:
        num_files = len(os.listdir("/proc/self/fd")) - 1  # without the folder itself
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_limited = soft_limit != resource.RLIM_INFINITY
        memory = ResidentMemory.current()
        resident_bytes = memory.private_bytes + memory.file_bytes + memory.shared_bytes
        metrics = {
            "driver/rss_mib": resident_bytes / _MIB,
            "driver/open_files_max": float(num_files),
            "driver/open_files_fraction": num_files / soft_limit if is_limited else 0.0,
            "driver/num_threads_max": float(len(os.listdir("/proc/self/task"))),
        }
        return metrics | dict(self._read_gateway() if self._read_gateway is not None else {})

    def _watch(self) -> None:
        while not self._is_closing.wait(LOOK_INTERVAL_S):
            self.look()


def gateway_metrics(gateway: Gateway) -> dict[str, float]:
    """Return what the gateway holds at the moment."""
    usage = gateway.usage()
    return {
        "gateway/held_mib": usage.bytes_held / _MIB,
        "gateway/session_held_mib": usage.most_bytes_held / _MIB,
        "gateway/in_flight_mib": usage.bytes_in_flight / _MIB,
        "gateway/num_connections": float(usage.num_connections),
    }


def watch_rollout_loop(runner: asyncio.Runner | EventLoopThread) -> LoopWatchdog:
    """Return the watchdog of the event loop of the rollouts; the caller enters it."""
    loop, thread = runner.run(_loop_and_thread())
    return LoopWatchdog(loop, thread, limit_s=PAUSE_LIMIT_S, report=_report_pause)


async def _loop_and_thread() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    return asyncio.get_running_loop(), threading.current_thread()


def _report_pause(place: str) -> None:
    _logger.warning(
        "the event loop of the rollouts has stood still for more than %g s at %s; meanwhile it "
        "serves no engine, tool or agent",
        PAUSE_LIMIT_S,
        place,
    )

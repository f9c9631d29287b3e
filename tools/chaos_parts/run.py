"""Runs a training job, kills its processes as planned, and restarts it when its driver dies.

If the driver ends without being killed, that counts as a failure; the command is restarted after at
most `MAX_FAILURES` of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.chaos_parts.processes import RUN_ENV_VAR, ProcessTracker

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("driver", "actor", "engine", "sandbox")
BAD_INPUT = 2
MAX_FAILURES = 3
_POLL_INTERVAL_S = 0.2
_EXIT_TIMEOUT_S = 30.0
_TARGET_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """A SIGKILL for one process of a kind, `delay_s` seconds after a number of RL steps."""

    kind: str
    """Kind of the target, one of `KINDS`."""
    step: int
    """Number of RL steps to wait for."""
    delay_s: float
    """Seconds to wait after that step."""


@dataclass(slots=True)
class RunHistory:
    """Events of a run."""

    folder: Path
    duration_s: float = 0.0
    """Seconds from start to end."""
    executed_kills: list[tuple[float, PlannedKill]] = field(default_factory=list)
    """Kills that were executed, with their times in seconds."""
    num_failures: int = 0
    """Number of times that the driver ended unfinished without being killed."""
    leftover_processes: dict[int, str] = field(default_factory=dict)
    """Command lines of processes that outlived the run, by pid."""
    step_times_s: dict[int, float] = field(default_factory=dict)
    """Time at which each number of RL steps was first seen in the metrics."""

    def step_durations_s(self) -> list[float]:
        """Return the seconds of each RL step; the first includes the start of the run."""
        times_s = [0.0, *(at_s for step, at_s in sorted(self.step_times_s.items()) if step)]
        return [end - begin for begin, end in pairwise(times_s)]


def plan_kills(
    num_kills: int, durations_s: Sequence[float], rng: random.Random
) -> list[PlannedKill]:
    """Plan kills at random times, in order of time, equally many of every kind.

    Args:
        num_kills: Number of kills.
        durations_s: `RunHistory.step_durations_s` of an undisturbed run, within which the times are
            drawn.
        rng: Random generator.
    """
    kinds = [KINDS[index % len(KINDS)] for index in range(num_kills)]
    rng.shuffle(kinds)
    steps = sorted(rng.randrange(len(durations_s)) for _ in range(num_kills))
    return [
        PlannedKill(kind, step, rng.uniform(0.0, durations_s[step]))
        for kind, step in zip(kinds, steps, strict=True)
    ]


class ChaosRun:
    """A run in `folder` whose processes are killed as planned; call `run` once."""

    def __init__(self, folder: Path, arguments: list[str], plan: list[PlannedKill]) -> None:
        self._run_dir = folder
        self._arguments = [*arguments, f"run_dir={folder}"]
        self._plan = list(plan)
        self._processes = ProcessTracker(str(folder))
        self._history = RunHistory(folder)
        self._start_s = time.monotonic()

    def run(self, deadline_s: float) -> RunHistory:
        """Run to the end; raise `RuntimeError` after `deadline_s` seconds or too many failures."""
        ends_at = self._start_s + deadline_s
        driver = self._start()
        try:
            while True:
                code = driver.poll()
                if code == 0:
                    break
                if code is not None:
                    self._count_failure(code)
                    driver = self._start()
                if time.monotonic() > ends_at:
                    raise RuntimeError(f"{self._run_dir}: did not end within {deadline_s:g} s")
                num_steps = rl_steps(self._run_dir)
                self._history.step_times_s.setdefault(num_steps, time.monotonic() - self._start_s)
                if self._plan and num_steps >= self._plan[0].step:
                    driver = self._execute_kill(self._plan.pop(0), driver)
                time.sleep(_POLL_INTERVAL_S)
        finally:
            self._history.duration_s = time.monotonic() - self._start_s
            self._history.leftover_processes = self._wait_for_exit()
            for pid in self._history.leftover_processes:
                os.kill(pid, signal.SIGKILL)
        return self._history

    def _start(self) -> subprocess.Popen[bytes]:
        self._run_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._run_dir.with_suffix(".out").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "mega_agentrl", *self._arguments],
                cwd=ROOT,
                env=os.environ | {RUN_ENV_VAR: str(self._run_dir)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _execute_kill(
        self, kill: PlannedKill, driver: subprocess.Popen[bytes]
    ) -> subprocess.Popen[bytes]:
        time.sleep(kill.delay_s)
        ends_at = time.monotonic() + _TARGET_TIMEOUT_S
        targets: list[int] = []
        while not targets and driver.poll() is None and time.monotonic() < ends_at:
            targets = (
                [driver.pid] if kill.kind == "driver" else self._processes.find_targets(kill.kind)
            )
            time.sleep(0.0 if targets else _POLL_INTERVAL_S)
        if not targets:
            return driver  # the driver has ended or no target exists: the kill is not counted
        target = random.Random(kill.delay_s).choice(targets)
        os.kill(target, signal.SIGKILL)
        self._history.executed_kills.append((time.monotonic() - self._start_s, kill))
        if kill.kind != "driver":
            return driver
        driver.wait()
        return self._start()

    def _count_failure(self, code: int) -> None:
        self._history.num_failures += 1
        if code == BAD_INPUT or self._history.num_failures > MAX_FAILURES:
            raise RuntimeError(
                f"{self._run_dir}: the driver ended {self._history.num_failures} times without "
                f"being killed, the last time with code {code}; see "
                f"{self._run_dir.with_suffix('.out')}"
            )

    def _wait_for_exit(self) -> dict[int, str]:
        ends_at = time.monotonic() + _EXIT_TIMEOUT_S
        while (live := self._processes.scan()) and time.monotonic() < ends_at:
            time.sleep(_POLL_INTERVAL_S)
        return live


def rl_steps(folder: Path) -> int:
    """Return the number of RL steps in the metrics so far."""
    return max((line["step"] for line in metrics(folder) if line["stage"] == "rl"), default=0)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]

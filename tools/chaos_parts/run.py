"""One run under fire: started, hit where the plan says, started again after its driver died.

A blow falls when the run has made `step` RL steps and `delay_s` more have passed, on one process of
its kind, with SIGKILL. Whatever else ends the driver is counted (`num_failures`) and the command
started again, a few times.
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

from tools.chaos_parts.processes import MARK, Family

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("driver", "actor", "engine", "sandbox")
BAD_INPUT = 2
MAX_FAILURES = 3
_LOOK_S = 0.2
_GONE_DEADLINE_S = 30.0
_VICTIM_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Blow:
    """kind: whom it hits. step: RL steps made before. delay_s: after that."""

    kind: str
    step: int
    delay_s: float


@dataclass(slots=True)
class Story:
    """What became of a run. dealt: the blows that fell, with the moment in seconds.

    num_failures: ends of the driver that nobody dealt. left: processes that outlived the run.
    reached: by number of RL steps, the moment when so many were first seen in the metrics.
    """

    folder: Path
    seconds: float = 0.0
    dealt: list[tuple[float, Blow]] = field(default_factory=list)
    num_failures: int = 0
    left: dict[int, str] = field(default_factory=dict)
    reached: dict[int, float] = field(default_factory=dict)

    def spans(self) -> list[float]:
        """Seconds of each RL step, all that came before among the first one's."""
        moments = [0.0, *(at_s for step, at_s in sorted(self.reached.items()) if step)]
        return [end - begin for begin, end in pairwise(moments)]


def make_plan(num_kills: int, spans: Sequence[float], draw: random.Random) -> list[Blow]:
    """Blows in order, every kind as often as the others, at random moments.

    spans: `Story.spans` of an undisturbed run. A step is drawn, then a moment of it.
    """
    kinds = [KINDS[index % len(KINDS)] for index in range(num_kills)]
    draw.shuffle(kinds)
    steps = sorted(draw.randrange(len(spans)) for _ in range(num_kills))
    return [
        Blow(kind, step, draw.uniform(0.0, spans[step]))
        for kind, step in zip(kinds, steps, strict=True)
    ]


class Run:
    """A run in a folder; `go` once."""

    def __init__(self, folder: Path, arguments: list[str], plan: list[Blow]) -> None:
        self._folder = folder
        self._arguments = [*arguments, f"run_dir={folder}"]
        self._plan = list(plan)
        self._family = Family(str(folder))
        self._story = Story(folder)
        self._from_s = time.monotonic()

    def go(self, deadline_s: float) -> Story:
        """To its end; raises `RuntimeError` where it does not get there."""
        ends_at = self._from_s + deadline_s
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
                    raise RuntimeError(f"{self._folder}: no end within {deadline_s:g} s")
                num_steps = rl_steps(self._folder)
                self._story.reached.setdefault(num_steps, time.monotonic() - self._from_s)
                if self._plan and num_steps >= self._plan[0].step:
                    driver = self._strike(self._plan.pop(0), driver)
                time.sleep(_LOOK_S)
        finally:
            self._story.seconds = time.monotonic() - self._from_s
            self._story.left = self._wait_gone()
            for pid in self._story.left:
                os.kill(pid, signal.SIGKILL)
        return self._story

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with self._folder.with_suffix(".out").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "mega_agentrl", *self._arguments],
                cwd=ROOT,
                env=os.environ | {MARK: str(self._folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _strike(self, blow: Blow, driver: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        time.sleep(blow.delay_s)
        ends_at = time.monotonic() + _VICTIM_DEADLINE_S
        victims: list[int] = []
        while not victims and driver.poll() is None and time.monotonic() < ends_at:
            victims = [driver.pid] if blow.kind == "driver" else self._family.victims(blow.kind)
            time.sleep(0.0 if victims else _LOOK_S)
        if not victims:
            return driver  # it has ended: a blow that did not fall is not counted
        victim = random.Random(blow.delay_s).choice(victims)
        os.kill(victim, signal.SIGKILL)
        self._story.dealt.append((time.monotonic() - self._from_s, blow))
        if blow.kind != "driver":
            return driver
        driver.wait()
        return self._start()

    def _count_failure(self, code: int) -> None:
        self._story.num_failures += 1
        if code == BAD_INPUT or self._story.num_failures > MAX_FAILURES:
            raise RuntimeError(
                f"{self._folder}: it ended {self._story.num_failures} times by itself, the last "
                f"time with code {code}; {self._folder.with_suffix('.out')} says why"
            )

    def _wait_gone(self) -> dict[int, str]:
        ends_at = time.monotonic() + _GONE_DEADLINE_S
        while (left := self._family.look()) and time.monotonic() < ends_at:
            time.sleep(_LOOK_S)
        return left


def rl_steps(folder: Path) -> int:
    """RL steps that are in the metrics now."""
    return max((line["step"] for line in metrics(folder) if line["stage"] == "rl"), default=0)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]

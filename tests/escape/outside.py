"""Runs attacks without isolation, as a plain child process, to prove that they work.

The damage is bounded by the values that an attack gets here; every run has a deadline, and its
process group is killed at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from _pytest.mark import ParameterSet

DEADLINE_S = 300.0

TARGETS = [
    "stateful",
    pytest.param("stateless", marks=pytest.mark.extended),
    pytest.param("workspace", marks=pytest.mark.extended),
]
"""Targets of attacks. Most of what holds code is the same: `make test` attacks a session."""

every_target = pytest.mark.parametrize(
    "target", ["stateful", "stateless", "workspace"], indirect=True
)
"""For attacks that another mechanism stops in each target: `make test` has all three."""


def parameters(names: Iterable[str], *, quick: Container[str]) -> list[ParameterSet]:
    """Return parameters for `names`, of which `make test` has only the `quick` ones."""
    extended = pytest.mark.extended
    return [pytest.param(name, marks=() if name in quick else extended) for name in names]


interpreters_only = pytest.mark.parametrize("target", TARGETS[:2], indirect=True)
"""For attacks on what only an interpreter has, such as a channel within reach of the code."""


def with_values(code: str, **values: object) -> str:
    """`code` with its values assigned in front of it."""
    return "".join(f"{name} = {value!r}\n" for name, value in values.items()) + code


@contextmanager
def started(code: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`code` in a plain interpreter with `folder` as working folder; killed with its group."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(DEADLINE_S)
        if child.stdout is not None:
            child.stdout.close()


def outside(code: str, folder: Path, **environment: str) -> str:
    """Return what `code` prints without isolation."""
    with started(code, folder, **environment) as child:
        output, _ = child.communicate(timeout=DEADLINE_S)
    return output.strip()


def pids_named(name: str) -> list[int]:
    """Host pids of the processes called `name` (see `/proc/PID/comm`), zombies left out."""
    return [
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _read(folder / "comm").strip() == name and ") Z " not in _read(folder / "stat")
    ]


def vanish(name: str, *, num_left: int = 0, timeout_s: float = 300.0) -> bool:
    """True as soon as `num_left` processes are called `name`: a kill takes the kernel a moment."""
    deadline = time.monotonic() + timeout_s
    while len(pids_named(name)) > num_left:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def end_all(name: str) -> int:
    """Kill every process called `name`; how many there were."""
    pids = pids_named(name)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ProcessLookupError):
        return ""

"""Finds the processes of a run by an environment variable and by their parents.

A process that was started with another environment (a sandbox) is found through its parents while
these are alive, so call `ProcessTracker.scan` regularly during the run.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

RUN_ENV_VAR = "MEGA_AGENTRL_CHAOS"
"""Environment variable whose value names the run."""

PROCESS_PATTERNS = {
    "actor": ("ray::PolicyActor",),
    "engine": ("VLLM::EngineCore", "ray::EngineActor"),
    "sandbox": ("ray::SandboxHost",),
}
"""Prefixes of the command lines of each kind of target; the driver is found by its pid."""


class ProcessTracker:
    """Tracks all processes that a run ever had."""

    def __init__(self, name: str) -> None:
        self._env_entry = f"{RUN_ENV_VAR}={name}".encode()
        self._known_processes: set[psutil.Process] = set()

    def scan(self) -> dict[int, str]:
        """Return the command lines of the live processes by pid; zombies are ``(zombie)``."""
        parents: dict[psutil.Process, int] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended
                parents[process] = process.ppid()
        run_processes = {
            process
            for process in parents
            if process in self._known_processes or self._env_entry in _environment(process)
        }
        pids = {process.pid for process in run_processes}
        while children := {p for p, parent in parents.items() if parent in pids} - run_processes:
            run_processes |= children
            pids |= {process.pid for process in children}
        self._known_processes |= run_processes
        ordered = sorted(run_processes, key=lambda process: process.pid)
        return {process.pid: _command(process) for process in ordered}

    def find_targets(self, kind: str) -> list[int]:
        """Return the pids of a kind of target."""
        return [
            pid for pid, words in self.scan().items() if words.startswith(PROCESS_PATTERNS[kind])
        ]


def _environment(process: psutil.Process) -> list[bytes]:
    """Return all entries of the environment.

    `Process.environ` stops early if the process has overwritten the first ones with its title.
    """
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return "(zombie)"
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""

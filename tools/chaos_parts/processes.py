"""Finds the processes of a run by an environment variable and by their parents.

A process that was started with another environment (a sandbox) is found by its parents while these
are alive, so call `ProcessTracker.scan` regularly while the run is going on.
"""

from __future__ import annotations

from pathlib import Path

RUN_ENV_VAR = "MEGA_AGENTRL_CHAOS"
"""Environment variable whose value names the run."""

PROCESS_PATTERNS = {
    "actor": ("ray::PolicyActor",),
    "engine": ("VLLM::EngineCore", "ray::EngineActor"),
    "sandbox": ("ray::SandboxHost",),
}
"""Prefixes of the command lines of each kind of target; the driver is found by its pid."""


class ProcessTracker:
    """Tracks all processes that a run ever had, by pid and start time."""

    def __init__(self, name: str) -> None:
        self._env_entry = f"{RUN_ENV_VAR}={name}".encode()
        self._seen: set[tuple[int, str]] = set()

    def scan(self) -> dict[int, str]:
        """Return the command lines of the live processes by pid; zombies are ``(zombie)``."""
        stats = {int(path.name): _stat(path) for path in Path("/proc").glob("[0-9]*")}
        alive = {pid: stat for pid, stat in stats.items() if stat is not None}
        found = {
            pid
            for pid, (start, _, _) in alive.items()
            if (pid, start) in self._seen
            or self._env_entry in _read_proc_file(pid, "environ").split(b"\0")
        }
        while more := {p for p, (_, parent, _) in alive.items() if parent in found} - found:
            found |= more
        self._seen |= {(pid, alive[pid][0]) for pid in found}
        return {pid: "(zombie)" if alive[pid][2] == "Z" else _command(pid) for pid in sorted(found)}

    def find_targets(self, kind: str) -> list[int]:
        """Return the pids of a kind of target."""
        return [
            pid for pid, words in self.scan().items() if words.startswith(PROCESS_PATTERNS[kind])
        ]


def _stat(path: Path) -> tuple[str, int, str] | None:
    """Return start time, parent and state, or None for a process that has ended."""
    try:
        words = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[19], int(words[1]), words[0]


def _command(pid: int) -> str:
    return _read_proc_file(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read_proc_file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

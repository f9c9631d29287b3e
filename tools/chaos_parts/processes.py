"""The processes of one run: found by a mark in their environment, and by who started them.

A process that was started with another environment (a sandbox) is known by its parents, as long
as these are there; so whoever wants to know what is left looks (`Family.look`) while it runs.
"""

from __future__ import annotations

from pathlib import Path

MARK = "MEGA_AGENTRL_CHAOS"
"""Environment variable whose value names the run."""

VICTIMS = {
    "actor": ("ray::PolicyActor",),
    "engine": ("VLLM::EngineCore", "ray::EngineActor"),
    "sandbox": ("ray::SandboxHost",),
}
"""Kinds of victims by the beginning of their command lines; the driver is its own kind."""


class Family:
    """All processes that a run ever had, by pid and start time."""

    def __init__(self, name: str) -> None:
        self._mark = f"{MARK}={name}".encode()
        self._seen: set[tuple[int, str]] = set()

    def look(self) -> dict[int, str]:
        """Command lines of those that are there now, zombies among them as ``(zombie)``."""
        stats = {int(path.name): _stat(path) for path in Path("/proc").glob("[0-9]*")}
        alive = {pid: stat for pid, stat in stats.items() if stat is not None}
        found = {
            pid
            for pid, (start, _, _) in alive.items()
            if (pid, start) in self._seen or self._mark in _read(pid, "environ").split(b"\0")
        }
        while more := {p for p, (_, parent, _) in alive.items() if parent in found} - found:
            found |= more
        self._seen |= {(pid, alive[pid][0]) for pid in found}
        return {pid: "(zombie)" if alive[pid][2] == "Z" else _command(pid) for pid in sorted(found)}

    def victims(self, kind: str) -> list[int]:
        """Processes of a kind of victim."""
        return [pid for pid, words in self.look().items() if words.startswith(VICTIMS[kind])]


def _stat(path: Path) -> tuple[str, int, str] | None:
    """Start time, parent and state; None for a process that has gone."""
    try:
        words = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[19], int(words[1]), words[0]


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

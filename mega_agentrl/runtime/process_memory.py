"""Read from `/proc` what the processes of a run hold in memory on this machine.

A process belongs to the run if its output goes to a file in the run's `logs/` folder, as that of
every rank, engine and sandbox host does (`remote_calls.redirect_output`), or if it descends from
such a process or from the driver. It is named after that file, `policy-rank0`. What descends from
the driver or from a sandbox host without a file of its own is `ray` or, for sandboxes and the other
workers of tools and rewards, `sandboxes`.

Memory means resident pages that belong to no file. Pages of files, mostly libraries, are shared by
processes and can be dropped. Pages that forks share are counted in each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DRIVER, RAY, SANDBOXES = "driver", "ray", "sandboxes"

_RAY_FOLDER = "/ray/"
"""Part of the command line of every server that Ray starts."""
_SANDBOX_HOST = "sandbox-host"
"""Beginning of the names of the hosts' log files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcess:
    """A process of the run."""

    pid: int
    name: str
    """Name of its log file without the suffix, or one of the constants of this module."""
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class _ProcessStatus:
    """The fields of `/proc/<pid>/status` that are used."""

    parent: int
    resident_bytes: int


def read_processes(
    log_folder: Path, driver_pid: int | None, proc: Path = Path("/proc")
) -> dict[int, RunProcess]:
    """Return the live processes of a run on this machine by id.

    Args:
        log_folder: Folder of the run's log files.
        driver_pid: Id of the driver; None if it runs on another machine.
        proc: Folder of the file system `proc`.
    """
    statuses = {
        pid: status
        for entry in os.listdir(proc)
        if entry.isdigit() and (status := _read_status(proc, pid := int(entry))) is not None
    }
    names = _NameFinder(log_folder.resolve(), driver_pid, proc, statuses)
    return {
        pid: RunProcess(pid=pid, name=name, resident_bytes=status.resident_bytes)
        for pid, status in statuses.items()
        if (name := names.find(pid))
    }


def sum_by_name(processes: Iterable[RunProcess]) -> dict[str, int]:
    """Return the bytes of all processes of each name, the largest first."""
    sums: dict[str, int] = {}
    for process in processes:
        sums[process.name] = sums.get(process.name, 0) + process.resident_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


class _NameFinder:
    """Finds the names of processes; empty for those of others."""

    def __init__(
        self,
        log_folder: Path,
        driver_pid: int | None,
        proc: Path,
        statuses: Mapping[int, _ProcessStatus],
    ) -> None:
        self._log_folder, self._driver_pid = log_folder, driver_pid
        self._proc, self._statuses = proc, statuses
        self._names: dict[int, str] = {}

    def find(self, pid: int) -> str:
        """Return the name of a process, looking at its ancestors as far as needed."""
        unnamed: list[int] = []
        name = ""
        while pid in self._statuses and pid not in unnamed:  # a process may have gone meanwhile
            if (name := self._names.get(pid, "") or self._own_name(pid)) or pid in self._names:
                break
            unnamed.append(pid)
            pid = self._statuses[pid].parent
        self._names[pid] = name
        if unnamed and (name == DRIVER or name.startswith(_SANDBOX_HOST)):
            name = RAY if self._is_ray(unnamed[-1]) else SANDBOXES
        self._names.update(dict.fromkeys(unnamed, name))
        return name

    def _own_name(self, pid: int) -> str:
        """Return the name that a process has by itself, not by its ancestors."""
        if pid == self._driver_pid:
            return DRIVER
        try:
            output = Path(os.readlink(self._proc / str(pid) / "fd" / "1"))
        except OSError:  # it has ended, or belongs to another user
            return ""
        is_log = output.parent == self._log_folder and output.suffix == ".log"
        return output.stem if is_log else ""

    def _is_ray(self, pid: int) -> bool:
        try:
            return _RAY_FOLDER.encode() in (self._proc / str(pid) / "cmdline").read_bytes()
        except OSError:
            return False


def _read_status(proc: Path, pid: int) -> _ProcessStatus | None:
    """Return the status of a process; None if it has ended or is a thread of the kernel."""
    try:
        with open(proc / str(pid) / "status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        kib = sum(int(fields[key].split()[0]) for key in ("RssAnon", "RssShmem"))
        return _ProcessStatus(int(fields["PPid"]), kib << 10)
    except (OSError, KeyError, ValueError):
        return None

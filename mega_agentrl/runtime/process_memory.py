"""Read from `/proc` what the processes of a run hold in memory on this machine, and its limits.

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
_GIB = 2**30


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


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """How full the machine or a control group is."""

    owner: str
    """`machine` or `control group`."""
    used_bytes: int
    """Bytes that cannot be freed at once."""
    limit_bytes: int

    @property
    def fraction(self) -> float:
        """Share of the limit that is used."""
        return self.used_bytes / self.limit_bytes

    def __str__(self) -> str:
        """Return the values for a message."""
        return (
            f"{self.used_bytes / _GIB:.1f} of {self.limit_bytes / _GIB:.1f} GiB "
            f"({self.fraction:.0%}) of this {self.owner}"
        )


class MemoryLimits:
    """The memory limits of this process: of the machine, and of each control group around it.

    Args:
        root: Root of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._meminfo = root / "proc" / "meminfo"
        self._vmstat = root / "proc" / "vmstat"
        self._groups = [
            folder for folder in _memory_groups(root) if _group_limit(folder) is not None
        ]

    def read(self) -> MemoryUse:
        """Return the fullest of the machine and the control groups."""
        uses = [use for folder in self._groups if (use := _read_group(folder)) is not None]
        return max([self._read_machine(), *uses], key=lambda use: use.fraction)

    def count_kills(self) -> int:
        """Return how many processes the kernel has killed for memory since the machine started.

        Processes of others and those in sandboxes are counted, too.
        """
        for line in self._vmstat.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0  # a kernel older than 4.13

    def _read_machine(self) -> MemoryUse:
        lines = self._meminfo.read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        total, available = (
            int(fields[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable")
        )
        return MemoryUse("machine", total - available, total)


_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_UNLIMITED_BYTES = 2**60
"""Version 1 writes a number near 2**63 where there is no limit."""


def _memory_groups(root: Path) -> list[Path]:
    """Return the folders of this process's control groups for memory, from the inside out."""
    hierarchies = {"": root / "sys/fs/cgroup", "memory": root / "sys/fs/cgroup/memory"}
    groups = []
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if (top := hierarchies.get(controller)) is not None:
                # In a container, the path may be that of the host, with the group mounted at `top`.
                folder = top / path.strip("/")
                groups += [
                    one for one in (folder, *folder.parents) if one == top or top in one.parents
                ]
    return [folder for folder in groups if folder.is_dir()]


def _group_files(folder: Path) -> tuple[str, str, str]:
    return _V2_FILES if (folder / _V2_FILES[0]).exists() else _V1_FILES


def _group_limit(folder: Path) -> int | None:
    try:
        text = (folder / _group_files(folder)[0]).read_text(encoding="ascii").strip()
    except OSError:
        return None
    limit = int(text) if text.isdigit() else _UNLIMITED_BYTES
    return limit if 0 < limit < _UNLIMITED_BYTES else None


def _read_group(folder: Path) -> MemoryUse | None:
    """Return how full a control group is, without the pages of files that can be dropped."""
    limit = _group_limit(folder)
    _, usage_file, inactive_key = _group_files(folder)
    try:
        used = int((folder / usage_file).read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return None
    fields = dict(line.split(" ", 1) for line in stat.splitlines())
    used -= int(fields.get(inactive_key, 0))
    return None if limit is None else MemoryUse("control group", max(0, used), limit)

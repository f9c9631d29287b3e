"""Limits of the memory of this process, and how full they are: the machine and its control groups.

A container is a control group: what the machine has is not what a process in it may use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory in use of the machine or a control group, and its limit."""

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
        return max(self._read_all(), key=lambda use: use.fraction)

    def smallest_bytes(self) -> int:
        """Return the smallest limit: the bytes that this process and its neighbours may use."""
        return min(use.limit_bytes for use in self._read_all())

    def _read_all(self) -> list[MemoryUse]:
        uses = [use for folder in self._groups if (use := _read_group(folder)) is not None]
        return [self._read_machine(), *uses]

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

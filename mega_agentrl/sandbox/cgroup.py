"""Control groups that limit the total memory and process count of a sandbox or session.

Version 2 is used where its controllers are available, else version 1. Where neither can be written
there is no group, and only the per-process limits apply. The name of a group contains the PID
namespace, process id and start time of its launcher, so that later launchers in the same namespace
can remove the groups of dead ones. Launchers in other namespaces, such as other containers of the
machine, may use the same hierarchy, and whether these are alive cannot be seen.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from pathlib import Path

from mega_agentrl.sandbox.guest.processes import stat_fields

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "mega_agentrl"
_MIB = 1 << 20
_REMOVE_DEADLINE_S = 2.0
_TCP_SHARE = 4
"""Part of the memory limit that buffers of sockets may take in version 1, which counts them apart.

Without a limit of their own they are no part of the group's memory, and a few hundred connections
over loopback fill `net.ipv4.tcp_mem`, which all connections of the machine share.
"""
_group_counter = itertools.count()
_pending_removal: list[Path] = []
"""Folders of this process that still held a process when `Cgroup.close` timed out."""


class Cgroup:
    """A control group: one folder per hierarchy, none if no group could be created."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @property
    def procs_files(self) -> list[str]:
        """Files to which a process writes its id to join the group; empty without a group."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    @property
    def limits_memory(self) -> bool:
        """Whether the total memory of the group's processes is limited."""
        names = ("memory.max", "memory.limit_in_bytes")
        return any((folder / name).exists() for folder in self._folders for name in names)

    @property
    def num_oom_kills(self) -> int:
        """Number of the group's processes that were killed for memory; 0 without a group."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    words = (folder / name).read_text(encoding="ascii").split()
                    if "oom_kill" in words:
                        return int(words[words.index("oom_kill") + 1])
        return 0

    def add(self, pid: int) -> None:
        """Move a process into the group, and read back that it is there.

        Raises:
            OSError: The process no longer exists, or could not be moved.
        """
        for procs_file in self.procs_files:
            path = Path(procs_file)
            path.write_text(str(pid), encoding="ascii")
            if str(pid) not in path.read_text(encoding="ascii").split():
                raise OSError(errno.ESRCH, f"process {pid} is not in the control group", procs_file)

    def close(self) -> None:
        """Remove the group, whose processes must have been killed. Safe to call twice.

        Folders that cannot be removed within 2 s are left to `remove_pending`.
        """
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        while self._folders:
            try:
                self._folders[-1].rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # the last process is still ending
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                _pending_removal.append(self._folders[-1])
            self._folders.pop()


def create_cgroup(*, memory_mib: int, num_processes: int) -> Cgroup:
    """Create a control group with these limits.

    Args:
        memory_mib: Total memory of the processes, page cache and tmpfs included.
        num_processes: Total number of processes and threads.
    """
    remove_pending()
    pid = os.getpid()
    launcher = f"{_pid_namespace()}-{pid}-{_process_start_ticks(pid)}"
    name = f"{_PREFIX}-{launcher}-{next(_group_counter)}"
    version_2 = {"memory.max": memory_mib * _MIB, "pids.max": num_processes, "memory.swap.max": 0}
    for base in _candidate_parents("", _unified_root()):
        folder = _create_folder(base / name, version_2, needed=("memory.max", "pids.max"))
        if folder is not None:
            return Cgroup([folder])
    folders = []
    version_1 = {
        "memory": {
            "memory.limit_in_bytes": memory_mib * _MIB,
            "memory.swappiness": 0,
            "memory.kmem.tcp.limit_in_bytes": memory_mib * _MIB // _TCP_SHARE,
        },
        "pids": {"pids.max": num_processes},
    }
    for controller, values in version_1.items():
        for base in _candidate_parents(controller, _ROOT / controller):
            folder = _create_folder(base / name, values, needed=tuple(values)[:1])
            if folder is not None:
                folders.append(folder)
                break
    return Cgroup(folders)


def remove_pending() -> None:
    """Remove the groups that were not yet empty when they were closed."""
    for folder in tuple(_pending_removal):
        with contextlib.suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            with contextlib.suppress(ValueError):  # another thread has removed it
                _pending_removal.remove(folder)


def remove_stale_cgroups() -> None:
    """Remove the empty groups of launchers of this PID namespace that no longer exist."""
    roots = [
        ("", _unified_root()),
        *((controller, _ROOT / controller) for controller in ("memory", "pids")),
    ]
    for controller, root in roots:
        for base in _candidate_parents(controller, root):
            for folder in base.glob(f"{_PREFIX}-{_pid_namespace()}-*-*-*"):
                pid, start = (int(word) for word in folder.name.split("-")[2:4])
                if _process_start_ticks(pid) != start:
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _unified_root() -> Path:
    return _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "unified"


def _candidate_parents(controller: str, root: Path) -> list[Path]:
    """Return the existing folders where a group may be created: our own, its parent, the root."""
    own_path = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own_path = path.strip("/")
    own_folder = root / own_path
    candidates = dict.fromkeys([own_folder, own_folder.parent, root])
    return [folder for folder in candidates if folder.is_relative_to(root) and folder.is_dir()]


def _create_folder(folder: Path, values: dict[str, int], *, needed: tuple[str, ...]) -> Path | None:
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        if all((folder / name).exists() for name in needed):
            for name, value in values.items():
                if (folder / name).exists():
                    with contextlib.suppress(*() if name in needed else (OSError,)):
                        (folder / name).write_text(str(value), encoding="ascii")
            return folder
    except OSError:
        pass
    with contextlib.suppress(OSError):
        folder.rmdir()
    return None


def _pid_namespace() -> int:
    """Return the number of this process's PID namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _process_start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot, or -1 if it does not exist."""
    try:
        return int(stat_fields(pid)[19])
    except OSError:
        return -1

"""A control group for each sandbox or session: its processes' memory and number together.

Best effort: version 2 where the controllers can be had, version 1 where that is what there
is, nothing where neither can be written (the limits of single processes hold all the same).
A group's name holds the process id and start time of its launcher, so that what a dead
launcher left behind is found and removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "mega_agentrl"
_MIB = 1 << 20
_REMOVE_DEADLINE_S = 2.0
_number = itertools.count()
_late: list[Path] = []
"""Folders of this process whose last process took longer than the deadline to end."""


class Cgroup:
    """Folders, one for each hierarchy; none where there is no control group to be had."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @property
    def is_real(self) -> bool:
        """It limits something."""
        return bool(self._folders)

    @property
    def entrances(self) -> list[str]:
        """Files to which a process writes its id to come in."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def add(self, pid: int) -> None:
        """Move a process in; raises `OSError` where it is gone."""
        for entrance in self.entrances:
            Path(entrance).write_text(str(pid), encoding="ascii")

    def close(self) -> None:
        """Remove it; its processes must have been killed. Safe twice.

        What cannot be removed within 2 s is left to `remove_late`.
        """
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        while self._folders:
            try:
                self._folders[-1].rmdir()
            except FileNotFoundError:
                pass
            except OSError:  # the last process is on its way out
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                _late.append(self._folders[-1])
            self._folders.pop()


def new_cgroup(*, memory_mib: int, num_processes: int) -> Cgroup:
    """A group with these limits of memory (page cache and tmpfs included) and processes."""
    remove_late()
    name = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_number)}"
    version_2 = {"memory.max": memory_mib * _MIB, "pids.max": num_processes, "memory.swap.max": 0}
    for base in _bases("", _unified()):
        folder = _make(base / name, version_2, needed=("memory.max", "pids.max"))
        if folder is not None:
            return Cgroup([folder])
    folders = []
    wanted = {"memory": {"memory.limit_in_bytes": memory_mib * _MIB, "memory.swappiness": 0}}
    for controller, values in (wanted | {"pids": {"pids.max": num_processes}}).items():
        for base in _bases(controller, _ROOT / controller):
            made = _make(base / name, values, needed=tuple(values)[:1])
            if made is not None:
                folders.append(made)
                break
    return Cgroup(folders)


def remove_late() -> None:
    """Remove the groups that were not empty when they were closed, and are now."""
    for folder in tuple(_late):
        with contextlib.suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            with contextlib.suppress(ValueError):  # another thread was faster
                _late.remove(folder)


def remove_leftovers() -> None:
    """Remove the empty groups of launchers that are gone."""
    roots = [("", _unified()), *((one, _ROOT / one) for one in ("memory", "pids"))]
    for controller, root in roots:
        for base in _bases(controller, root):
            for folder in base.glob(f"{_PREFIX}-*-*-*"):
                pid, start = (int(word) for word in folder.name.split("-")[1:3])
                if _start_time(pid) != start:
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _unified() -> Path:
    return _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "unified"


def _bases(controller: str, root: Path) -> list[Path]:
    """Where a group may be made: in our own, beside it, or at the top; what exists of these."""
    own = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = path.strip("/")
    places = [root / own, (root / own).parent, root]
    found = [place for place in dict.fromkeys(places) if place.is_relative_to(root)]
    return [place for place in found if place.is_dir()]


def _make(folder: Path, values: dict[str, int], *, needed: tuple[str, ...]) -> Path | None:
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        if all((folder / name).exists() for name in needed):
            for name, value in values.items():
                if (folder / name).exists():
                    (folder / name).write_text(str(value), encoding="ascii")
            return folder
    except OSError:
        pass
    with contextlib.suppress(OSError):
        folder.rmdir()
    return None


def _start_time(pid: int) -> int:
    """In clock ticks after boot; -1 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return -1
    return int(text.rpartition(") ")[2].split()[19])

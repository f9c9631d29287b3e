"""The wall around a sandbox: which bubblewrap command puts a Python interpreter behind it.

Inside: own user, mount, PID, IPC, network (no interface but loopback), UTS and cgroup
namespaces; no capability; `/usr` and the interpreter's own folders read-only; an empty
environment. The program inside (`inner`) makes further namespaces, small tmpfs, limits and
a system call filter for each call or session. Works the same for root, whose sandboxes run
under users of their own (`stage`, `host_user`), and for any other user.

Not covered: errors of the kernel in the system calls that are allowed; side channels (time,
caches, load); memory of several processes together where no control group can be written
(limits are per process then); the disk bandwidth and CPU share of other users; what a branch
does through files its parent held open at the fork. A container whose own filter or masked
/proc forbids user namespaces or mounting proc cannot hold sandboxes: `check_isolation` says so.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.process import run_to_end
from mega_agentrl.sandbox.stage import REFUSED

if TYPE_CHECKING:
    from collections.abc import Sequence

INNER_PATH = "/sandbox"
"""Where the inner program's package is seen from inside."""

_ENVIRONMENT = Path("/sandbox/environment")
"""Where a virtual environment is seen from inside, wherever it lies: it may be below /tmp,
which every call replaces by a tmpfs of its own."""

_PACKAGE = "mega_agentrl/sandbox/inner"
_START = (
    "import sys; sys.path.insert(0, {0!r}); from mega_agentrl.sandbox.inner.main import main; "
    "del sys.path[0]; main(sys.argv[1])"
)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_CALM = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "LANG": "C.UTF-8"}
"""A thread of the allocator's would not survive a fork, and might hold a lock meanwhile."""

_INNER_ID = "1000"
_CHECK_DEADLINE_S = 20.0


def find_bubblewrap() -> str:
    """Absolute path of `bwrap`; raises `ValueError` naming the package where it is missing."""
    path = shutil.which("bwrap")
    if path is None:
        raise ValueError(
            "sandbox: program bwrap not found on PATH, expected bubblewrap; install the system "
            "package `bubblewrap` (apt-get install bubblewrap). For trusted code only: "
            "tool.python.isolation=none"
        )
    return path


def check_isolation(user: int | None = None) -> None:
    """Raise `ValueError` where sandboxes cannot be made here, saying what is missing.

    user: host user that sandboxes run under, None for our own.
    """
    command = staged([*_wall(), "--", "/usr/bin/true"], user=user)
    try:
        code, error = run_to_end(command, timeout_s=_CHECK_DEADLINE_S)
    except TimeoutError as slow:
        raise ValueError(f"sandbox: {slow}; expected an answer at once") from slow
    if code == REFUSED:
        raise ValueError(f"sandbox: {error}")
    if code != 0:
        raise ValueError(
            f"sandbox: bwrap failed with exit code {code}: {error or 'no message'}; expected user, "
            "mount, PID and network namespaces. Probable cause: a container or kernel that does "
            "not allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
        )


def walled_command(settings: str) -> list[str]:
    """The command that starts the inner program behind the wall, for `staged`.

    settings: its one argument, see `inner.settings`.
    """
    inner = Path(__file__).with_name("inner")
    return [
        *_wall(),
        *("--ro-bind", _mark(inner), f"{INNER_PATH}/{_PACKAGE}"),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        "--",
        *(interpreter_path(), "-I", "-B", "-c", _START.format(INNER_PATH), settings),
    ]


def open_command(settings: str) -> list[str]:
    """The same without any wall: for trusted code only."""
    root = str(Path(__file__).parents[2])
    variables = [f"{name}={value}" for name, value in _variables().items()]
    program = [sys.executable, "-I", "-B", "-c", _START.format(root), settings]
    return ["/usr/bin/env", *variables, *program]


def staged(
    command: list[str], *, user: int | None = None, cgroups: Sequence[str] = ()
) -> list[str]:
    """`command` by way of `stage`: as that user, in those cgroups."""
    marks = [word for word in command if word.startswith(_MARK)]
    job = {
        "cgroups": list(cgroups),
        "user": user,
        "folders": [mark.removeprefix(_MARK) for mark in marks],
        "command": [f"{{{marks.index(w)}}}" if w in marks else w for w in command],
    }
    program = str(Path(__file__).with_name("stage.py"))
    return [sys.executable, "-I", "-S", "-B", program, json.dumps(job)]


_MARK = "reach:"
"""Ahead of a path that the sandbox's user may be unable to reach by itself."""


def _mark(folder: Path | str) -> str:
    return f"{_MARK}{folder}"


def _variables() -> dict[str, str]:
    fixed = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"} | _CALM
    return fixed | dict.fromkeys(_THREADS, "1")


def _wall() -> list[str]:
    command = [find_bubblewrap(), "--unshare-all", "--die-with-parent", "--new-session"]
    command += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    # Not 0: only the id 0 needs a capability to be mapped again in a nested user namespace.
    command += ["--uid", _INNER_ID, "--gid", _INNER_ID]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            command += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.exists():
            command += ["--ro-bind", str(folder), str(folder)]
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        command += ["--ro-bind-try", name, name]
    for folder in interpreter_folders():
        command += ["--ro-bind", _mark(folder), str(folder)]
    if sys.prefix != sys.base_prefix:
        command += ["--ro-bind", _mark(sys.prefix), str(_ENVIRONMENT)]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for name, value in _variables().items():
        command += ["--setenv", name, value]
    return command


def interpreter_path() -> str:
    """This process's interpreter as it is seen from inside."""
    if sys.prefix == sys.base_prefix:
        return sys.executable
    return str(_ENVIRONMENT / Path(sys.executable).relative_to(sys.prefix))


def interpreter_folders() -> list[Path]:
    """Folders outside /usr, at their own place, without which this interpreter does not run.

    A virtual environment is not among them. Raises `ValueError` for an interpreter below
    /tmp: it would vanish inside.
    """
    binary = Path(sys.executable).resolve()
    wanted = [Path(sys.base_prefix), binary.parent.parent]
    wanted += [folder.resolve() for folder in wanted]
    folders: list[Path] = []
    for folder in sorted(set(wanted)):
        if folder.is_relative_to("/tmp"):
            raise ValueError(
                f"sandbox: the Python interpreter lies in {folder}; expected a place outside /tmp, "
                "which sandboxes replace. Probable cause: a Python unpacked there; make .venv from "
                "another one (make env PYTHON=...)"
            )
        if folder == Path("/"):
            continue
        if not any(folder.is_relative_to(known) for known in (Path("/usr"), *folders)):
            folders.append(folder)
    return folders

"""The wall around a sandbox: which bubblewrap command puts a Python interpreter behind it.

Inside: own user, mount, PID, IPC, network (no interface but loopback), UTS and cgroup
namespaces; no capability; `/usr` and the interpreter's own folders read-only; an empty
environment. The interpreter nests further user namespaces: one in which it may make
namespaces for its calls, and one for each call, whose two small tmpfs are all that is
writable (see `interpreter`). Works the same for root and for any other user.

Not covered: the kernel's own attack surface (no system-call filter), and the memory of
several processes together (limits are per process).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from mega_agentrl.sandbox.process import run_to_end

PROGRAM_PATH = "/sandbox/interpreter.py"
"""Where the inner program is seen from inside."""

_ENVIRONMENT = Path("/sandbox/environment")
"""Where a virtual environment is seen from inside, wherever it lies: it may be below /tmp,
which every call replaces by a tmpfs of its own."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_INNER_ID = "1000"
_CHECK_DEADLINE_S = 20.0


def find_bubblewrap() -> str:
    """Absolute path of `bwrap`; raises `ValueError` naming the package where it is missing."""
    path = shutil.which("bwrap")
    if path is None:
        raise ValueError(
            "sandbox: program bwrap not found on PATH, expected bubblewrap; "
            "install the system package `bubblewrap` (apt-get install bubblewrap)"
        )
    return path


def check_isolation() -> None:
    """Raise `ValueError` where sandboxes cannot be made here, saying what is missing."""
    command = [*_wall(), "--", "/usr/bin/true"]
    try:
        code, error = run_to_end(command, timeout_s=_CHECK_DEADLINE_S)
    except TimeoutError as slow:
        raise ValueError(f"sandbox: {slow}; expected an answer at once") from slow
    if code != 0:
        raise ValueError(
            f"sandbox: bwrap failed with exit code {code}: {error or 'no message'}; expected user, "
            "mount, PID and network namespaces. Probable cause: a container or kernel that does "
            "not allow user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
        )


def interpreter_command(settings: str) -> list[str]:
    """The command that starts the inner program behind the wall.

    settings: its one argument, see `interpreter.Settings`.
    """
    program = Path(__file__).with_name("interpreter.py")
    return [
        *_wall(),
        *("--ro-bind", str(program), PROGRAM_PATH),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        "--",
        *(interpreter_path(), "-I", "-B", PROGRAM_PATH, settings),
    ]


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
        command += ["--ro-bind", str(folder), str(folder)]
    if sys.prefix != sys.base_prefix:
        command += ["--ro-bind", sys.prefix, str(_ENVIRONMENT)]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    command += ["--setenv", "LANG", "C.UTF-8"]
    for name in _THREADS:
        command += ["--setenv", name, "1"]
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

"""The bubblewrap command that isolates a sandbox's Python interpreter, or any other program.

A sandbox has its own user, mount, PID, IPC, network (loopback only), UTS and cgroup namespaces, no
capabilities, `/usr` and the interpreter's own folders read-only, and a few fixed environment
variables. For each call or session the guest program adds further namespaces, a small tmpfs, limits
and a system call filter. This works for root, whose sandboxes run under user ids of their own
(`pre_exec`, `uid_lease`), and for any other user.

Not covered: bugs of the kernel in the allowed system calls; side channels (timing, caches, load);
the total memory of several processes where no control group can be written, since limits are then
per process; disk bandwidth and CPU share of other users; writes of a fork to files that its parent
had open; two of the kernel's counts per user, which the sessions of one sandbox share (without root
those of all sandboxes, and the launcher): pages of pipes, of which new pipes get fewer when they
are used up, and epoll watches. Of the other counts a session gets nothing (inotify instances,
descriptors in flight, keys, message queues, locked memory) or a small share (queued signals), and
processes are limited per namespace. `check_isolation` reports containers in which sandboxes cannot
run, and what allows them there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox.pre_exec import EXIT_SETUP_FAILED
from mega_agentrl.sandbox.process import PIPE, run_command, start_child

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GUEST_PATH = "/sandbox"
"""Mount point of the guest package inside the sandbox."""

_VENV_PATH = Path("/sandbox/environment")
"""Mount point of a virtual environment inside the sandbox.

It is not the environment's own path, because that may be below /tmp, on which every call mounts a
tmpfs.
"""

_GUEST_PACKAGE = "mega_agentrl/sandbox/guest"
_THREAD_COUNT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FIXED_VARIABLES = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "LANG": "C.UTF-8"}
"""The allocator's background thread is off: it would not survive a fork and might hold a lock."""

_NETWORK_FILES = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates", "/etc/pki/tls/certs"),
)
"""What a program reads to resolve names and to check certificates."""

_BIND_MARKER = "reach:"
"""Prefix of a path in the command that the sandbox's user may be unable to reach by itself."""

_OWNED_MARKER = "owned:"
"""Prefix of such a path whose owner the sandbox's user is to stand for."""

_FILTERED = (
    "user namespaces are refused, most likely by the container's filter of system calls (Docker: "
    "--security-opt seccomp=unconfined; Kubernetes: seccompProfile of type Unconfined)"
)
_NO_USER_NAMESPACES = (
    "user namespaces are refused (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; or the "
    "process is in a chroot, where the kernel allows none)"
)
_NO_PROC = (
    "mounting /proc is refused, because a part of it is hidden here (Docker: "
    "--security-opt systempaths=unconfined; Kubernetes: procMount Unmasked)"
)
_NO_NETWORK = "network namespaces are refused (sysctl user.max_net_namespaces)"

_GUEST_ID = "1000"
_CHECK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BindMount:
    """A file, folder or socket of the host that a sandbox sees."""

    source: Path
    """Path on the host."""
    target: Path
    """Path in the sandbox."""
    is_writable: bool = False
    """Whether the sandbox may write to it, as far as its user may."""


def find_bubblewrap() -> str:
    """Return the absolute path of `bwrap`; raises `ValueError` if it is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise InputError(
            "program bwrap of the sandbox",
            "none on PATH",
            "bubblewrap",
            "the system package `bubblewrap` is not installed (apt-get install bubblewrap). For "
            "trusted code only: tool.python.isolation=none",
        )
    return path


def check_isolation(user: int | None = None) -> None:
    """Raise `ValueError` if sandboxes cannot run here, saying what is missing.

    Args:
        user: Host user id that sandboxes run under; None for this process's own.
    """
    command = pre_exec_command([*_bwrap_command(), "--", "/usr/bin/true"], user=user)
    try:
        code, error = run_command(command, timeout_s=_CHECK_TIMEOUT_S)
    except TimeoutError as slow:
        raise InputError("program bwrap of the sandbox", str(slow), "an answer at once") from slow
    if code == EXIT_SETUP_FAILED:
        raise ValueError(f"sandbox: {error}")
    if code != 0:
        raise InputError(
            "program bwrap of the sandbox",
            f"exit code {code}: {error or 'no message'}",
            "user, mount, PID and network namespaces",
            _find_refusal(user),
        )


def _find_refusal(user: int | None) -> str:
    """Return which of the things that a sandbox needs is refused here, and what allows it."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    refusals = {
        ("--unshare-user",): _FILTERED if "\nSeccomp:\t2" in status else _NO_USER_NAMESPACES,
        ("--unshare-user", "--unshare-pid", "--proc", "/proc"): _NO_PROC,
        ("--unshare-user", "--unshare-net"): _NO_NETWORK,
    }
    for options, cause in refusals.items():
        command = [find_bubblewrap(), *options, "--ro-bind", "/usr", "/usr"]
        for name in ("lib", "lib64"):
            command += ["--ro-bind-try", f"/{name}", f"/{name}"]
        command = pre_exec_command([*command, "--", "/usr/bin/true"], user=user)
        if run_command(command, timeout_s=_CHECK_TIMEOUT_S)[0] != 0:
            return cause
    return "a folder of the system or of the interpreter that this user cannot read"


def isolated_command(settings: str, layers: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that starts the guest program isolated, for `pre_exec_command`.

    Args:
        settings: `GuestSettings` as JSON.
        layers: For workspaces, folders of this machine by their mount points in the sandbox; an
            empty path makes an empty folder. What belongs to a folder's owner belongs to the
            sandbox's user there, who cannot write to it, but to a layer above it.
    """
    mounts: list[str] = []
    for target, folder in (layers or {}).items():
        mounts += ["--ro-bind", f"{_OWNED_MARKER}{folder}", target] if folder else ["--dir", target]
    return [
        *_bwrap_command(),
        *_bind_guest_package(),
        *mounts,
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        "--",
        *(interpreter_path(), "-I", "-B", _start_program(GUEST_PATH), "main", settings),
    ]


def isolated_launcher_command(
    settings_fd: int,
    *,
    mounts: Sequence[BindMount],
    files: Mapping[str, int],
    shares_network: bool,
    tmpfs_mib: int,
) -> list[str]:
    """Return the command that starts the launcher isolated, for `pre_exec_command`.

    Args:
        settings_fd: Inherited descriptor of a file with `LauncherSettings` as JSON.
        mounts: What the sandbox sees beside the system, in order.
        files: Inherited descriptor of the content by path of a read-only file.
        shares_network: Whether the sandbox has the host's network.
        tmpfs_mib: Size of `/tmp`, and of `/dev/shm`, where bubblewrap can limit it.
    """
    command = [*_bwrap_command(shares_network=shares_network), *_bind_guest_package()]
    size = ["--size", str(tmpfs_mib << 20)] if _can_limit_tmpfs() else []
    for folder in ("/tmp", "/dev/shm"):
        command += [*size, "--perms", "0700", "--tmpfs", folder]
    for path, descriptor in files.items():
        command += ["--perms", "0444", "--ro-bind-data", str(descriptor), path]
    for mount in mounts:
        option = "--bind" if mount.is_writable else "--ro-bind"
        command += [option, _mark_bind(mount.source), str(mount.target)]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--"]
    return [*command, *_launcher_command(interpreter_path(), GUEST_PATH, settings_fd)]


def unisolated_launcher_command(settings_fd: int) -> list[str]:
    """Return the command that starts the launcher without isolation, for trusted code only."""
    return _launcher_command(sys.executable, str(Path(__file__).parents[2]), settings_fd)


def _launcher_command(python: str, root: str, settings_fd: int) -> list[str]:
    program = _start_program(root)
    return [python, "-I", "-S", "-B", program, "command_launcher", str(settings_fd)]


def _start_program(root: str) -> str:
    return f"{root}/{_GUEST_PACKAGE}/start.py"


def unisolated_command(settings: str) -> list[str]:
    """Return the command that starts the guest program without isolation, for trusted code only."""
    root = str(Path(__file__).parents[2])
    variables = [f"{name}={value}" for name, value in _environment_variables().items()]
    program = [sys.executable, "-I", "-B", _start_program(root), "main", settings]
    return ["/usr/bin/env", *variables, *program]


def pre_exec_command(
    command: list[str], *, user: int | None = None, cgroups: Sequence[str] = ()
) -> list[str]:
    """Wrap `command` with `pre_exec`, which switches to `user` and joins `cgroups` first."""
    marked_paths = [word for word in command if word.startswith((_BIND_MARKER, _OWNED_MARKER))]
    request = {
        "cgroups": list(cgroups),
        "user": user,
        "folders": [path.partition(":")[2] for path in marked_paths],
        "owned": [path.startswith(_OWNED_MARKER) for path in marked_paths],
        "command": [f"{{{marked_paths.index(w)}}}" if w in marked_paths else w for w in command],
    }
    program = str(Path(__file__).with_name("pre_exec.py"))
    return [sys.executable, "-I", "-S", "-B", program, json.dumps(request)]


def _mark_bind(path: Path | str) -> str:
    return f"{_BIND_MARKER}{path}"


def _bind_guest_package() -> list[str]:
    guest_package = Path(__file__).with_name("guest")
    return ["--ro-bind", _mark_bind(guest_package), f"{GUEST_PATH}/{_GUEST_PACKAGE}"]


@cache
def _can_limit_tmpfs() -> bool:
    """Return whether bubblewrap has the option `--size`, as from version 0.7 on."""
    with start_child([find_bubblewrap(), "--help"], stdout=PIPE) as child:
        return b"--size" in child.communicate(timeout=_CHECK_TIMEOUT_S)[0]


def _environment_variables() -> dict[str, str]:
    fixed = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"} | _FIXED_VARIABLES
    return fixed | dict.fromkeys(_THREAD_COUNT_VARIABLES, "1")


def shell_variables() -> dict[str, str]:
    """Return the environment variables of a workspace's shell."""
    return _environment_variables() | {"TERM": "dumb", "PAGER": "cat"}


def _bwrap_command(*, shares_network: bool = False) -> list[str]:
    command = [find_bubblewrap(), "--unshare-all", "--die-with-parent", "--new-session"]
    if shares_network:
        command.append("--share-net")
        for name in _NETWORK_FILES:
            command += ["--ro-bind-try", name, name]
    command += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    # Not 0, because to map the id 0 again in a nested user namespace needs a capability.
    command += ["--uid", _GUEST_ID, "--gid", _GUEST_ID]
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
        command += ["--ro-bind", _mark_bind(folder), str(folder)]
    if sys.prefix != sys.base_prefix:
        command += ["--ro-bind", _mark_bind(sys.prefix), str(_VENV_PATH)]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for name, value in _environment_variables().items():
        command += ["--setenv", name, value]
    return command


def interpreter_path() -> str:
    """Return the path of this process's interpreter inside the sandbox."""
    if sys.prefix == sys.base_prefix:
        return sys.executable
    # Not its path relative to `sys.prefix`, because only that one has no `..` left.
    return str(_VENV_PATH / "bin" / Path(sys.executable).name)


def interpreter_folders() -> list[Path]:
    """Return the folders outside /usr that this interpreter needs, bound at their own paths.

    A virtual environment is not among them.

    Raises:
        ValueError: The interpreter is below /tmp, which sandboxes replace.
    """
    binary = Path(sys.executable).resolve()
    prefixes = [Path(sys.base_prefix), binary.parent.parent]
    prefixes += [folder.resolve() for folder in prefixes]
    folders: list[Path] = []
    for folder in sorted(set(prefixes)):
        if folder.is_relative_to("/tmp"):
            raise InputError(
                "folder of the Python interpreter",
                folder,
                "a place outside /tmp, which sandboxes replace",
                "Python was unpacked there; create .venv with another one (make env PYTHON=...)",
            )
        if folder == Path("/"):
            continue
        if not any(folder.is_relative_to(known) for known in (Path("/usr"), *folders)):
            folders.append(folder)
    return folders

"""The interpreter process, which runs the policy's code: its set-up and its main loop.

An interpreter is a clone of the warm supervisor and process 1 of its own PID namespace (where the
kernel ignores signals that it sends to itself and has no handler for). Before it reads the first
order it mounts its own `/tmp`, `/dev/shm` and `/proc`, applies its limits, drops all capabilities
and installs the seccomp filter. From then on the policy's code controls it, so the supervisor lets
its messages affect only its own calls.

Orders, on its control channel::

    -> {"order": "run", "id": int, "code": str} <- {"event": "done", "id": int, "code": int}
    -> {"order": "fork"} + stdout, stderr and control descriptors of the fork

To fork, the interpreter clones itself into namespaces nested in its own and is never run again (see
`interpreter_manager`). The clone reports on its own channel::

    <- {"event": "hello"}       -> {"order": "go"}       <- {"event": "ready"}

Between hello and go the fork is stopped and its namespaces are set up. After `ready` no process of
an interpreter can pass descriptors (`syscalls.deny_sendmsg`). Variables and random generators
are unchanged; only the main thread continues, as with any fork.

Code runs like `python -c` (`run_to_exit`), or like the next cell of a notebook (`run_code`).
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import errno
import fcntl
import io
import itertools
import math
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.guest import syscalls
from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.messages import INTERPRETER_ORDERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.sandbox.guest.settings import GuestSettings

WRITABLE_FOLDERS = ("/tmp", "/dev/shm")
"""The folders an interpreter may write to; each is its own tmpfs."""

_MIB = 1 << 20
_MAX_ORDER_BYTES = 1 << 26
_NUM_FORK_FDS = 3
_MAX_FD = 1 << 30
_NUM_RESERVED_FDS = 32
_NUM_PENDING_SIGNALS = 256
"""Queued signals and timers of an interpreter's processes together."""
_NUM_TERMINALS = 64
"""Pseudo-terminals of an interpreter or a workspace, of the 3,072 that the sandboxes of a machine
share: what a terminal multiplexer uses, and few enough for the others to get theirs."""


def run_interpreter(
    control: socket.socket, outputs: tuple[int, int], settings: GuestSettings, folder: str
) -> None:
    """Set up and run a new interpreter process; never returns.

    Args:
        control: Channel to the supervisor.
        outputs: Write ends of the pipes for stdout and stderr.
        settings: Limits.
        folder: Working folder; /tmp if isolated.
    """
    try:
        (control_fd,) = leave_supervisor(outputs, settings, control.detach())
        channel = _open_channel(control_fd)
        if settings.isolated:
            enter_namespaces(settings)
        os.chdir(folder)
        apply_limits(settings)
        become_oom_victim()
        _reseed_numpy()
        fds: tuple[int, ...] = ()
        if settings.isolated:
            syscalls.drop_capabilities()
            program = base64.b64decode(settings.seccomp_filter)
            listener = syscalls.install_seccomp_filter(program, listener=settings.stateful)
            fds = (listener,) if settings.stateful else ()
        channel.send({"event": "ready"}, fds)
        for fd in fds:
            os.close(fd)
        if settings.isolated:
            syscalls.deny_sendmsg()
        if settings.stateful:
            _serve_orders(channel, settings)
        else:
            _serve_one_call(channel)
    except EOFError:  # the supervisor is gone
        pass
    except BaseException:  # noqa: BLE001  the edge of the process
        traceback.print_exc()
    finally:
        os._exit(1)


def leave_supervisor(outputs: tuple[int, int], settings: GuestSettings, *fds: int) -> list[int]:
    """Separate a new process from its supervisor, which it still dies with.

    Args:
        outputs: Write ends of the pipes for stdout and stderr.
        settings: Limits.
        fds: Descriptors to keep; all others of the supervisor, such as other interpreters'
            channels, are closed.

    Returns:
        The new numbers of `fds`, beyond those that the policy's code may use.
    """
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    os.setsid()
    syscalls.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lowest = _min_control_fd(settings)
    new_fds: list[int] = []
    for fd in fds:
        new_fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest))
        lowest = new_fds[-1] + 1
    for before, after in itertools.pairwise([2, *new_fds, _MAX_FD]):
        os.closerange(before + 1, after)
    return new_fds


def enter_namespaces(settings: GuestSettings) -> None:
    """Set up new namespaces, with all capabilities: ids, loopback, tmpfs folders and /proc."""
    syscalls.map_own_ids()
    if settings.stateful:
        syscalls.bring_up_loopback()
    mount_writable_folders(settings)


def mount_writable_folders(settings: GuestSettings) -> None:
    """Mount a tmpfs on each writable folder, and a /proc that shows only our own processes."""
    options = f"size={settings.tmpfs_mib}m,nr_inodes={settings.num_inodes},mode=0700"
    for folder in WRITABLE_FOLDERS:
        syscalls.mount("tmpfs", folder, syscalls.MS_NOSUID_NODEV, options)
    mount_terminals("/dev/pts")
    syscalls.mount("proc", "/proc", syscalls.MS_NOSUID_NODEV | syscalls.MS_NOEXEC)


def mount_terminals(folder: str) -> None:
    """Mount a file system of pseudo-terminals with a limit of its own."""
    options = f"newinstance,ptmxmode=0666,mode=0620,max={_NUM_TERMINALS}"
    syscalls.mount("devpts", folder, syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options)


def _open_channel(fd: int) -> Channel:
    return Channel(
        socket.socket(fileno=fd),
        accepts=INTERPRETER_ORDERS,
        max_bytes=_MAX_ORDER_BYTES,
        max_fds=_NUM_FORK_FDS,
    )


def apply_limits(settings: GuestSettings) -> None:
    """Set the limits of this process and of all that it starts."""
    if settings.memory_mib:
        with open("/proc/self/statm", encoding="ascii") as file:
            warm_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        syscalls.set_hard_limit(resource.RLIMIT_AS, warm_bytes + settings.memory_mib * _MIB)
    syscalls.set_hard_limit(resource.RLIMIT_FSIZE, settings.max_file_mib * _MIB)
    syscalls.set_hard_limit(resource.RLIMIT_NOFILE, settings.num_open_files + _NUM_RESERVED_FDS)
    _set_open_file_limit(settings.num_open_files)
    syscalls.set_hard_limit(resource.RLIMIT_CORE, 0)
    cpu_s = math.ceil(settings.cpu_limit_s) + 1  # the supervisor enforces the exact limit
    if settings.stateful:  # the hard limit would end the session
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, hard))
    else:
        syscalls.set_hard_limit(resource.RLIMIT_CPU, cpu_s)
    if settings.isolated:  # without namespaces all processes of the user would count
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        number = settings.num_processes
        soft = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        # The kernel counts these per user, whom the sessions of a sandbox share.
        syscalls.set_hard_limit(resource.RLIMIT_SIGPENDING, _NUM_PENDING_SIGNALS)
        syscalls.set_hard_limit(resource.RLIMIT_MSGQUEUE, 0)
        syscalls.set_hard_limit(resource.RLIMIT_MEMLOCK, 0)


def become_oom_victim() -> None:
    """Let the kernel choose this process and its children first when memory runs out."""
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("900")


def _min_control_fd(settings: GuestSettings) -> int:
    """Return the lowest descriptor for the channel, beyond those that the code may use."""
    return settings.num_open_files + _NUM_RESERVED_FDS // 2


def _set_open_file_limit(number: int) -> int:
    """Set the soft limit of open files, at most to the hard one; return the old soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))
    return soft


def _reseed_numpy() -> None:
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # the standard library reseeds itself after a fork, numpy does not


def _serve_one_call(channel: Channel) -> None:
    module, main_pid = new_main_module(), os.getpid()
    order = channel.receive()
    code = run_to_exit(module, order["code"])
    if os.getpid() != main_pid:  # a child that the code forked returned here
        os._exit(code)
    channel.send({"event": "done", "id": order["id"], "code": code})
    os._exit(code)


def _serve_orders(channel: Channel, settings: GuestSettings) -> None:
    module = new_main_module()
    while True:
        try:
            # Make room for the descriptors that come with an order, however many are open.
            max_open_files = _set_open_file_limit(_MAX_FD)
            order = channel.receive()
            _reap_children()
            if order["order"] == "run":
                _set_open_file_limit(max_open_files)
                main_pid = os.getpid()
                code = _run_and_flush(module, order["code"])
                if os.getpid() != main_pid:  # a child that the code forked returned here
                    os._exit(code)
                channel.send({"event": "done", "id": order["id"], "code": code})
            else:
                channel = _serve_fork(channel, settings)
                _set_open_file_limit(max_open_files)
        except (EOFError, OSError):
            return
        except BaseException:  # noqa: BLE001  such as an error of the policy's signal handler
            traceback.print_exc()


def _run_and_flush(module: types.ModuleType, code: str) -> int:
    status = run_code(module, code)
    return flush_output() or status


def _reap_children() -> None:
    """Collect the children that the supervisor has killed, and forks that have ended.

    They would stay in the control group's number of processes.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _serve_fork(channel: Channel, settings: GuestSettings) -> Channel:
    """Clone this process; return the fork's own channel in the fork, else the given one."""
    fds = channel.take_fds(_NUM_FORK_FDS)
    flush_output()
    folder = _working_folder()
    restore = _capture_random_state()
    try:
        pid = _fork_process(settings)
    except OSError as error:
        channel.send({"event": "refused", "errno": error.errno or errno.EPERM})
        pid = -1
    if pid == 0:
        try:
            channel.close()
            channel = _enter_fork(fds, settings, folder)
            restore()
            channel.send({"event": "ready"})
        except BaseException:  # noqa: BLE001  an incomplete fork must not go on
            os._exit(1)
        return channel
    for fd in fds:
        os.close(fd)
    return channel


def _fork_process(settings: GuestSettings) -> int:
    if not settings.isolated:
        return os.fork()
    while True:
        with contextlib.suppress(InterruptedError):  # by a signal that the code has a handler for
            return syscalls.clone(syscalls.INTERPRETER_NAMESPACES | syscalls.CLONE_NEWNET)


def _enter_fork(fds: list[int], settings: GuestSettings, folder: str) -> Channel:
    if settings.isolated:
        syscalls.drop_capabilities()
    else:  # without a namespace the fork would outlive its parent
        syscalls.die_with_parent()
    os.setsid()  # a signal to its process group must not reach other interpreters
    out, err, control = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    control_fd = fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, _min_control_fd(settings))
    for fd in fds:
        os.close(fd)
    channel = _open_channel(control_fd)
    _renew_output_locks()
    channel.send({"event": "hello"})
    folder = channel.receive()["folder"] or folder
    try:
        os.chdir(folder)
    except OSError:  # the folder does not exist here
        os.chdir(WRITABLE_FOLDERS[0])
    return channel


def _renew_output_locks() -> None:
    """Give the output streams of a fork new locks: a thread that wrote may have held the old ones.

    A fork has no such thread, so that the first to print would wait forever. What a stream's buffer
    held then is dropped; all but the threads' own text was flushed before the fork.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        buffer = getattr(stream, "buffer", None)
        if isinstance(buffer, io.BufferedWriter):
            with contextlib.suppress(ValueError, OSError):  # it is closed or detached
                io.BufferedWriter.__init__(buffer, buffer.raw)  # CPython makes a new lock


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the policy's code removed it
        return WRITABLE_FOLDERS[0]


def _capture_random_state() -> Callable[[], Any]:
    """Return a function that restores `random`'s state: Python reseeds it in a forked child."""
    module: Any = sys.modules.get("random")
    if module is None:
        return lambda: None
    state = module.getstate()
    return lambda: module.setstate(state)


EXIT_FLUSH_FAILED = 120
"""Python's own exit code when it cannot flush."""


def new_main_module() -> types.ModuleType:
    """Create an empty `__main__` module, as `python -c` does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    return module


def run_to_exit(module: types.ModuleType, code: str) -> int:
    """Run `code`, its threads and its exit handlers to the end; return the exit code."""
    status = run_code(module, code)
    threading._shutdown()  # type: ignore[attr-defined]  # also ends open executors
    atexit._run_exitfuncs()
    return flush_output() or status


def run_code(module: types.ModuleType, code: str) -> int:
    """Run `code` in `module` and return its exit code; an exception is printed."""
    try:
        # dont_inherit: the future statement at the top of this file must not apply to the code.
        exec(compile(code, "<string>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        with contextlib.suppress(BaseException):  # the value and the stream belong to the code
            print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  the policy's code may raise anything
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def flush_output() -> int:
    """Flush stdout and stderr; return 0, or `EXIT_FLUSH_FAILED`."""
    status = 0
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001  the disk is full, or the code replaced the stream
            status = EXIT_FLUSH_FAILED
    return status

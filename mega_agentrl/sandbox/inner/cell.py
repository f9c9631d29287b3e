"""The process that runs the policy's code: its set-up and its loop.

A cell is a clone of the warm supervisor, process 1 of its own PID namespace (so that signals
it sends itself are ignored where it has no handler: the kernel's rule). It mounts its own
`/tmp`, `/dev/shm` and `/proc`, limits itself, drops every capability and installs the filter,
all before it reads the first order. From the first order on it is the policy's: whatever it
says afterwards is believed only as far as it concerns itself.

Orders, on its control channel::

    -> {"order": "run", "code": str}            <- {"event": "done", "code": int}
    -> {"order": "fork"} + stdout, stderr, control of the branch

At a fork the cell clones itself into namespaces nested in its own and is never run again
(see `cells`); the clone, the branch, says on its own channel::

    <- {"event": "hello"}       -> {"order": "go"}       <- {"event": "ready"}

Between hello and go the supervisor has its folders made. Variables are as they were, random
generators too; threads other than the main one end, as with any fork.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import math
import os
import resource
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any

from mega_agentrl.sandbox.inner import kernel
from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.inner.execute import flush, new_main, run, run_once

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

    from mega_agentrl.sandbox.inner.settings import Settings

FOLDERS = ("/tmp", "/dev/shm")
"""Where a cell may write; each is a tmpfs of its own."""

_MIB = 1 << 20
_MAX_ORDER_BYTES = 1 << 26
_ALL_FDS = 1 << 30
_SPARE_FDS = 32


def live(control: socket.socket, outputs: tuple[int, int], settings: Settings, folder: str) -> None:
    """Everything a new cell does; never returns.

    folder: its working folder; /tmp behind the wall.
    """
    try:
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        os.setsid()
        kernel.end_with_parent()
        moved = fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, _control_fd(settings))
        os.closerange(3, moved)
        os.closerange(moved + 1, _ALL_FDS)  # the supervisor's: other cells' channels, for one
        channel = _channel(moved)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if settings.walled:
            enter_folders(settings)
        os.chdir(folder)
        _limit(settings)
        _reseed()
        fds: tuple[int, ...] = ()
        if settings.walled:
            kernel.drop_capabilities()
            program = base64.b64decode(settings.filter)
            listener = kernel.install_filter(program, listener=settings.stateful)
            fds = (listener,) if settings.stateful else ()
        channel.send({"event": "ready"}, fds)
        for fd in fds:
            os.close(fd)
        if settings.stateful:
            _serve(channel, settings)
        else:
            _serve_once(channel)
    except EOFError:  # the supervisor is gone
        pass
    except BaseException:  # noqa: BLE001  the edge of the process
        traceback.print_exc()
    finally:
        os._exit(1)


def enter_folders(settings: Settings) -> None:
    """In new namespaces with all capabilities: fresh tmpfs, and a /proc of ours only."""
    kernel.map_own_ids()
    if settings.stateful:
        kernel.raise_loopback()
    mount_folders(settings)


def mount_folders(settings: Settings) -> None:
    """Mount the cell's folders over what is there."""
    options = f"size={settings.tmpfs_mib}m,nr_inodes={settings.num_inodes},mode=0700"
    for folder in FOLDERS:
        kernel.mount("tmpfs", folder, kernel.MS_NOSUID_NODEV, options)
    kernel.mount("proc", "/proc", kernel.MS_NOSUID_NODEV | kernel.MS_NOEXEC)


def _channel(fd: int) -> Channel:
    return Channel(socket.socket(fileno=fd), max_bytes=_MAX_ORDER_BYTES)


def _limit(settings: Settings) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        warm = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _lower(resource.RLIMIT_AS, warm + settings.memory_mib * _MIB)
    _lower(resource.RLIMIT_FSIZE, settings.file_mib * _MIB)
    _lower(resource.RLIMIT_NOFILE, settings.num_files + _SPARE_FDS)
    _set_files(settings.num_files)
    _lower(resource.RLIMIT_CORE, 0)
    cpu_s = math.ceil(settings.cpu_s) + 1  # the supervisor counts too, and says so
    if settings.stateful:  # the hard limit would end the session
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, hard))
    else:
        _lower(resource.RLIMIT_CPU, cpu_s)
    if settings.walled:  # the filter keeps it; without it the whole user's processes count
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        number = settings.num_processes
        soft = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    with contextlib.suppress(OSError):  # the kernel's last resort should hit us first
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("900")


def _control_fd(settings: Settings) -> int:
    """At least this: out of the way of code that closes all its descriptors."""
    return settings.num_files + _SPARE_FDS // 2


def _set_files(number: int) -> int:
    """Set the limit of open files, as far as the hard one goes; the limit there was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))
    return soft


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _reseed() -> None:
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # the standard library reseeds itself after a fork, numpy does not


def _serve_once(channel: Channel) -> None:
    module, own = new_main(), os.getpid()
    code = run_once(module, channel.receive()["code"])
    if os.getpid() != own:  # a child that the code forked and let come to its end
        os._exit(code)
    channel.send({"event": "done", "code": code})
    os._exit(code)


def _serve(channel: Channel, settings: Settings) -> None:
    module = new_main()
    while True:
        try:
            files = _set_files(_ALL_FDS)  # an order's descriptors need room, whatever is open
            order = channel.receive()
            if order["order"] == "run":
                _set_files(files)
                _reap()
                own = os.getpid()
                code = _run_and_flush(module, order["code"])
                if os.getpid() != own:  # a child that the code forked and let come to its end
                    os._exit(code)
                channel.send({"event": "done", "code": code})
            else:
                channel = _fork(channel, settings)
                _set_files(files)
        except (EOFError, OSError):
            return
        except BaseException:  # noqa: BLE001  a signal handler of the policy's, for one
            traceback.print_exc()


def _run_and_flush(module: types.ModuleType, code: str) -> int:
    status = run(module, code)
    return flush() or status


def _reap() -> None:
    """Collect what the supervisor has killed since the last call."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork(channel: Channel, settings: Settings) -> Channel:
    """Clone ourselves; in the branch its own channel, ready, else the one given."""
    fds = channel.take_fds(3)
    flush()
    folder = _working_folder()
    restore = _random_state()
    try:
        pid = _clone(settings)
    except OSError as error:
        channel.send({"event": "refused", "errno": error.errno})
        pid = -1
    if pid == 0:
        try:
            channel.close()
            channel = _become_branch(fds, settings, folder)
            restore()
            channel.send({"event": "ready"})
        except BaseException:  # noqa: BLE001  half a branch must not go on
            os._exit(1)
        return channel
    for fd in fds:
        os.close(fd)
    return channel


def _clone(settings: Settings) -> int:
    if settings.walled:
        return kernel.clone(kernel.CELL_FLAGS | kernel.CLONE_NEWNET)
    return os.fork()


def _become_branch(fds: list[int], settings: Settings, folder: str) -> Channel:
    if settings.walled:
        kernel.drop_capabilities()
    else:  # no namespace ends it with the supervisor, whose death ends its parent
        kernel.end_with_parent()
    os.setsid()  # a signal to its process group must not reach its relatives
    out, err, control = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    moved = fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, _control_fd(settings))
    for fd in fds:
        os.close(fd)
    branch = _channel(moved)
    branch.send({"event": "hello"})
    folder = branch.receive().get("folder", folder)
    try:
        os.chdir(folder)
    except OSError:  # it was no folder of ours, or is gone
        os.chdir(FOLDERS[0])
    return branch


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the policy removed it
        return FOLDERS[0]


def _random_state() -> Callable[[], Any]:
    """Restores `random` as it is now: Python reseeds it in a forked child."""
    module: Any = sys.modules.get("random")
    if module is None:
        return lambda: None
    state = module.getstate()
    return lambda: module.setstate(state)

"""Works inside the namespaces of cells: gives a branch its ids, loopback, /proc and a copy of
the files, and ends what a call left running.

A branch is cloned by a cell that is filtered and has no capability; what its new namespaces
need is done by others. `Hands` is a small process, forked before the heavy imports so that
its own forks are cheap. It sits in the user namespace in which the first cell's was made,
and so has every capability over that one and all below. For each job it forks a helper that
enters the cell's namespaces, does the work and exits. The policy's code never runs
in it.

Copied: files (also sparse ones), folders, symbolic links and pipes, with mode and times.
Hard links become separate files, sockets are left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import sys
import traceback
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.inner import kernel
from mega_agentrl.sandbox.inner.cell import FOLDERS, mount_folders
from mega_agentrl.sandbox.inner.channel import Channel

if TYPE_CHECKING:
    from mega_agentrl.sandbox.inner.settings import Settings

_DEADLINE_S = 10.0
_MAX_DEPTH = 128


class Hands:
    """The helper process; made while the interpreter is small."""

    def __init__(self, settings: Settings) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                _serve(Channel(theirs), settings)
            finally:
                os._exit(1)
        theirs.close()
        self._channel = Channel(ours)

    def arrange(self, branch: int, parent: int) -> None:
        """Set the branch's namespaces up, with the parent's files; raises `OSError`.

        branch, parent: process ids as this process sees them; both stay put meanwhile.
        """
        self._do(f"arrange {parent} {branch}")

    def sweep(self, cell: int) -> None:
        """Kill all in the cell's PID namespace but its first process; raises `OSError`.

        One system call made inside: no fork can escape it. Not for a cell with branches.
        """
        self._do(f"sweep {cell}")

    def _do(self, job: str) -> None:
        self._channel.send({"job": job})
        answer = self._channel.receive(timeout_s=_DEADLINE_S)
        if answer["error"]:
            raise OSError(f"{job.split()[0]} a cell's namespaces: {answer['error']}")


def _serve(channel: Channel, settings: Settings) -> None:
    """One helper after the other, each forked before its job is known: that saves the wait."""
    while True:
        jobs_r, jobs_w = os.pipe()
        errors_r, errors_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(jobs_w)
            _help(jobs_r, errors_w, channel, settings)
        os.close(jobs_r)
        os.close(errors_w)
        try:
            job = channel.receive()
        except EOFError:
            return  # the helper ends with its pipe
        os.write(jobs_w, job["job"].encode())
        os.close(jobs_w)
        _, status = os.waitpid(pid, 0)
        if status:
            with open(errors_r, encoding="utf-8", errors="replace", closefd=False) as file:
                error = file.read() or f"the helper ended with status {status}"
            channel.send({"error": error})
        os.close(errors_r)


def _help(jobs: int, errors: int, channel: Channel, settings: Settings) -> None:
    """Do one job; never returns. Answers by itself where it succeeds."""
    code = 1
    try:
        match os.read(jobs, 100).decode().split():
            case ["arrange", parent, branch]:
                code = _arrange(parent, branch, channel, settings)
            case ["sweep", cell]:
                code = _sweep(cell, channel)
    except BaseException:  # noqa: BLE001  the edge of the process
        last = traceback.format_exception_only(*sys.exc_info()[:2])
        os.write(errors, "".join(last).strip().encode()[:1000])
    finally:
        os._exit(code)


def _sweep(cell: str, channel: Channel) -> int:
    spaces = [os.open(f"/proc/{cell}/ns/{name}", os.O_RDONLY) for name in ("user", "pid")]
    kernel.setns(spaces[0], kernel.CLONE_NEWUSER)
    kernel.setns(spaces[1], kernel.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        return _answer(pid, channel)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    return 0


def _answer(pid: int, channel: Channel) -> int:
    """Only when the process inside has gone: the cell could see it, and kill it."""
    _, status = os.waitpid(pid, 0)
    if status:
        return 1
    channel.send({"error": ""})
    return 0


def _arrange(parent: str, branch: str, channel: Channel, settings: Settings) -> int:
    """Enter the branch's namespaces; a child of ours is then in its PID namespace too."""
    sources = [os.open(f"/proc/{parent}/root{folder}", os.O_RDONLY) for folder in FOLDERS]
    names = ("user", "net", "pid", "mnt")
    spaces = [os.open(f"/proc/{branch}/ns/{name}", os.O_RDONLY) for name in names]
    kernel.setns(spaces[0], kernel.CLONE_NEWUSER)
    kernel.map_own_ids(branch)
    kernel.setns(spaces[1], kernel.CLONE_NEWNET)
    kernel.raise_loopback()
    kernel.setns(spaces[2], kernel.CLONE_NEWPID)
    kernel.setns(spaces[3], kernel.CLONE_NEWNS)
    pid = os.fork()
    if pid:
        return _answer(pid, channel)
    mount_folders(settings)
    for source, folder in zip(sources, FOLDERS, strict=True):
        copy_tree(source, os.open(folder, os.O_RDONLY))
    return 0


def copy_tree(source: int, target: int, *, depth: int = 0) -> None:
    """Copy what lies in one folder into another, empty one; descriptors of both.

    Raises `OSError` where the target is too small or folders nest more than 128 deep.
    """
    if depth > _MAX_DEPTH:
        raise OSError(errno.ELOOP, f"folders nested more than {_MAX_DEPTH} deep")
    with os.scandir(source) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            _copy_entry(entry.name, info, source, target, depth)
    about = os.fstat(source)
    os.fchmod(target, stat.S_IMODE(about.st_mode))
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))


def _copy_entry(name: str, info: os.stat_result, source: int, target: int, depth: int) -> None:
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(name, 0o700, dir_fd=target)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with contextlib.ExitStack() as stack:
            inner = [os.open(name, flags, dir_fd=folder) for folder in (source, target)]
            for fd in inner:
                stack.callback(os.close, fd)
            copy_tree(*inner, depth=depth + 1)
        return
    times = (info.st_atime_ns, info.st_mtime_ns)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISREG(info.st_mode):
        _copy_file(name, info, source, target)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(name, 0o600, dir_fd=target)
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)  # whatever our umask is
    else:
        return
    os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, info: os.stat_result, source: int, target: int) -> None:
    old = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source)
    new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    try:
        end = 0
        while (start := _next_data(old, end)) is not None:
            end = os.lseek(old, start, os.SEEK_HOLE)
            _copy_range(old, new, start, end)
        os.ftruncate(new, info.st_size)
        os.fchmod(new, stat.S_IMODE(info.st_mode))
    finally:
        os.close(old)
        os.close(new)


def _next_data(fd: int, offset: int) -> int | None:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole to the end
            return None
        raise


def _copy_range(old: int, new: int, start: int, end: int) -> None:
    os.lseek(new, start, os.SEEK_SET)
    while start < end:
        sent = os.sendfile(new, old, start, end - start)
        if sent == 0:
            return
        start += sent

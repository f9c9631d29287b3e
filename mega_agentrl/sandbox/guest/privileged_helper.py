"""A helper process that works inside the namespaces of interpreters.

It gives a fork its ids, loopback, /proc and a copy of the files, and it kills the processes that a
call left running. A fork is cloned by an interpreter that is filtered and has no capabilities, so
another process must set up its new namespaces.

The helper is forked before the heavy imports, so that its own forks are cheap. It is in the parent
of all interpreters' user namespaces and therefore has every capability in them. For each job it
forks a child that enters the interpreter's namespaces, does the work and exits. The policy's code
never runs in it.

It copies files (sparse ones stay sparse), folders, symbolic links and pipes, with mode and times.
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

from mega_agentrl.sandbox.guest import syscalls
from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.interpreter import WRITABLE_FOLDERS, mount_writable_folders

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.settings import GuestSettings

_JOB_TIMEOUT_S = 10.0
_MAX_FOLDER_DEPTH = 128


class PrivilegedHelper:
    """The helper process; create it while the supervisor is still small."""

    def __init__(self, settings: GuestSettings) -> None:
        parent_end, helper_end = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            parent_end.close()
            try:
                _serve_jobs(Channel(helper_end), settings)
            finally:
                os._exit(1)
        helper_end.close()
        self._channel = Channel(parent_end)

    def set_up_fork(self, fork_pid: int, parent_pid: int) -> None:
        """Set up the fork's namespaces and copy the parent's files; raises `OSError`.

        Both processes must stay stopped meanwhile.
        """
        self._request(f"set_up_fork {parent_pid} {fork_pid}")

    def kill_namespace(self, pid: int) -> None:
        """Kill every process in a PID namespace except the first, `pid`; raises `OSError`.

        This is one system call inside the namespace, which no process can escape by forking. It
        must not be used for an interpreter that has forks.
        """
        self._request(f"kill_namespace {pid}")

    def _request(self, job: str) -> None:
        self._channel.send({"job": job})
        reply = self._channel.receive(timeout_s=_JOB_TIMEOUT_S)
        if reply["error"]:
            raise OSError(
                f"{job.split()[0]} failed in an interpreter's namespaces: {reply['error']}"
            )


def _serve_jobs(channel: Channel, settings: GuestSettings) -> None:
    """Serve jobs in forked children, each forked before its job arrives to save time."""
    while True:
        jobs_r, jobs_w = os.pipe()
        errors_r, errors_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(jobs_w)
            _run_job(jobs_r, errors_w, channel, settings)
        os.close(jobs_r)
        os.close(errors_w)
        try:
            job = channel.receive()
        except EOFError:
            return  # the waiting child ends with its pipe
        os.write(jobs_w, job["job"].encode())
        os.close(jobs_w)
        _, status = os.waitpid(pid, 0)
        if status:
            with open(errors_r, encoding="utf-8", errors="replace", closefd=False) as file:
                error = file.read() or f"the helper ended with status {status}"
            channel.send({"error": error})
        os.close(errors_r)


def _run_job(jobs: int, errors: int, channel: Channel, settings: GuestSettings) -> None:
    """Do one job; never returns. The job itself reports success."""
    code = 1
    try:
        match os.read(jobs, 100).decode().split():
            case ["set_up_fork", parent_pid, fork_pid]:
                code = _set_up_fork(parent_pid, fork_pid, channel, settings)
            case ["kill_namespace", interpreter_pid]:
                code = _kill_namespace(interpreter_pid, channel)
    except BaseException:  # noqa: BLE001  the edge of the process
        last = traceback.format_exception_only(*sys.exc_info()[:2])
        os.write(errors, "".join(last).strip().encode()[:1000])
    finally:
        os._exit(code)


def _kill_namespace(interpreter_pid: str, channel: Channel) -> int:
    namespace_fds = [
        os.open(f"/proc/{interpreter_pid}/ns/{name}", os.O_RDONLY) for name in ("user", "pid")
    ]
    syscalls.setns(namespace_fds[0], syscalls.CLONE_NEWUSER)
    syscalls.setns(namespace_fds[1], syscalls.CLONE_NEWPID)
    pid = os.fork()
    if pid:
        return _reply_after_exit(pid, channel)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    return 0


def _reply_after_exit(pid: int, channel: Channel) -> int:
    """Report success once process `pid` inside the namespace has ended.

    Until then the interpreter could see it and kill it.
    """
    _, status = os.waitpid(pid, 0)
    if status:
        return 1
    channel.send({"error": ""})
    return 0


def _set_up_fork(parent_pid: str, fork_pid: str, channel: Channel, settings: GuestSettings) -> int:
    """Enter the fork's namespaces and set them up; a child in its PID namespace copies files."""
    sources = [
        os.open(f"/proc/{parent_pid}/root{folder}", os.O_RDONLY) for folder in WRITABLE_FOLDERS
    ]
    names = ("user", "net", "pid", "mnt")
    namespace_fds = [os.open(f"/proc/{fork_pid}/ns/{name}", os.O_RDONLY) for name in names]
    syscalls.setns(namespace_fds[0], syscalls.CLONE_NEWUSER)
    syscalls.map_own_ids(fork_pid)
    syscalls.setns(namespace_fds[1], syscalls.CLONE_NEWNET)
    syscalls.bring_up_loopback()
    syscalls.setns(namespace_fds[2], syscalls.CLONE_NEWPID)
    syscalls.setns(namespace_fds[3], syscalls.CLONE_NEWNS)
    pid = os.fork()
    if pid:
        return _reply_after_exit(pid, channel)
    mount_writable_folders(settings)
    for source, folder in zip(sources, WRITABLE_FOLDERS, strict=True):
        copy_tree(source, os.open(folder, os.O_RDONLY))
    return 0


def copy_tree(source: int, target: int, *, depth: int = 0) -> None:
    """Copy the contents of one folder into another, empty one.

    Args:
        source: Descriptor of the folder to copy.
        target: Descriptor of the empty folder.
        depth: Levels above these folders.

    Raises:
        OSError: The target is too small, or folders nest more than 128 deep.
    """
    if depth > _MAX_FOLDER_DEPTH:
        raise OSError(errno.ELOOP, f"folders nested more than {_MAX_FOLDER_DEPTH} deep")
    with os.scandir(source) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            _copy_entry(entry.name, info, source, target, depth)
    info = os.fstat(source)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_entry(name: str, info: os.stat_result, source: int, target: int, depth: int) -> None:
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(name, 0o700, dir_fd=target)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with contextlib.ExitStack() as stack:
            subfolders = [os.open(name, flags, dir_fd=folder) for folder in (source, target)]
            for fd in subfolders:
                stack.callback(os.close, fd)
            copy_tree(*subfolders, depth=depth + 1)
        return
    times = (info.st_atime_ns, info.st_mtime_ns)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISREG(info.st_mode):
        _copy_file(name, info, source, target)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(name, 0o600, dir_fd=target)
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)  # mkfifo applies the umask
    else:
        return
    os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, info: os.stat_result, source: int, target: int) -> None:
    source_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source)
    target_fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    try:
        end = 0
        while (start := _next_data_offset(source_fd, end)) is not None:
            end = os.lseek(source_fd, start, os.SEEK_HOLE)
            _copy_range(source_fd, target_fd, start, end)
        os.ftruncate(target_fd, info.st_size)
        os.fchmod(target_fd, stat.S_IMODE(info.st_mode))
    finally:
        os.close(source_fd)
        os.close(target_fd)


def _next_data_offset(fd: int, offset: int) -> int | None:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole up to the end
            return None
        raise


def _copy_range(source_fd: int, target_fd: int, start: int, end: int) -> None:
    os.lseek(target_fd, start, os.SEEK_SET)
    while start < end:
        sent = os.sendfile(target_fd, source_fd, start, end - start)
        if sent == 0:
            return
        start += sent

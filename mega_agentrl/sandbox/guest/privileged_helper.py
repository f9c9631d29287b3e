"""Sets up the namespaces of a fork, in a process of its own.

A fork is cloned by an interpreter that is filtered and has no capabilities, so another process must
give it its ids, loopback, /proc and a copy of the files. The supervisor is in the parent of all
interpreters' user namespaces, so a child of the supervisor has every capability in them.

For each fork the supervisor starts one helper, which enters the fork's namespaces, does its work
and exits; its exit status is the answer, so no answer can be taken for that of another job. A
helper that misses its deadline is killed. **It enters a PID namespace only while no process of the
policy can run there**: the caller has stopped the fork, which is alone and has one thread. The
helper's memory is charged to the session's cgroup, and so are the files that it copies.

It copies files (sparse ones stay sparse), folders, symbolic links and pipes, with mode and times.
Hard links become separate files, sockets are left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import sys
import time
import traceback
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.guest import syscalls
from mega_agentrl.sandbox.guest.interpreter import WRITABLE_FOLDERS, mount_writable_folders

if TYPE_CHECKING:
    from mega_agentrl.sandbox.guest.settings import GuestSettings

_MAX_FOLDER_DEPTH = 128
_MAX_ERROR_BYTES = 1000


def set_up_fork(
    settings: GuestSettings, fork_pid: int, parent_pid: int, *, deadline: float
) -> None:
    """Set up the fork's namespaces and copy the parent's files.

    Both processes must be stopped, and the fork alone in its PID namespace.

    Args:
        settings: Sizes of the writable folders.
        fork_pid: Process id of the fork.
        parent_pid: Process id of the interpreter that it was cloned from.
        deadline: When to give up, in seconds of `time.monotonic`.

    Raises:
        OSError: The set-up failed; `TimeoutError` at the deadline.
    """
    errors_r, errors_w = os.pipe()
    with open(errors_r, "rb") as errors:
        helper_pid = os.fork()
        if helper_pid == 0:
            _run_job(errors_w, settings, fork_pid, parent_pid)
        os.close(errors_w)
        is_late = not _has_ended(helper_pid, deadline)
        if is_late:
            os.kill(helper_pid, signal.SIGKILL)
        _, status = os.waitpid(helper_pid, 0)
        if is_late:
            raise TimeoutError("the fork's files were not copied in time")
        if status:
            os.set_blocking(errors_r, False)
            text = (errors.read(_MAX_ERROR_BYTES) or b"").decode("utf-8", "replace")
            raise OSError(f"set-up of a fork failed: {text or f'the helper ended with {status}'}")


def _has_ended(pid: int, deadline: float) -> bool:
    """Wait until a child ends; return False at the deadline."""
    pidfd = os.pidfd_open(pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
    finally:
        os.close(pidfd)


def _run_job(errors: int, settings: GuestSettings, fork_pid: int, parent_pid: int) -> None:
    """Do the work of one helper; never returns."""
    code = 1
    try:
        syscalls.die_with_parent()
        code = _set_up_fork(settings, fork_pid, parent_pid)
    except BaseException:  # noqa: BLE001  the edge of the process
        last = traceback.format_exception_only(*sys.exc_info()[:2])
        os.write(errors, "".join(last).strip().encode("utf-8", "replace")[:_MAX_ERROR_BYTES])
    finally:
        os._exit(code)


def _set_up_fork(settings: GuestSettings, fork_pid: int, parent_pid: int) -> int:
    """Enter the fork's namespaces and set them up; a child in its PID namespace copies files.

    Returns:
        The exit status of the helper, or of its child.
    """
    sources = [
        os.open(f"/proc/{parent_pid}/root{folder}", os.O_RDONLY) for folder in WRITABLE_FOLDERS
    ]
    names = ("user", "net", "pid", "mnt")
    namespace_fds = [os.open(f"/proc/{fork_pid}/ns/{name}", os.O_RDONLY) for name in names]
    syscalls.setns(namespace_fds[0], syscalls.CLONE_NEWUSER)
    syscalls.map_own_ids(str(fork_pid))
    syscalls.setns(namespace_fds[1], syscalls.CLONE_NEWNET)
    syscalls.bring_up_loopback()
    syscalls.setns(namespace_fds[2], syscalls.CLONE_NEWPID)
    syscalls.setns(namespace_fds[3], syscalls.CLONE_NEWNS)
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return 1 if status else 0
    syscalls.die_with_parent()
    mount_writable_folders(settings)
    for source, folder in zip(sources, WRITABLE_FOLDERS, strict=True):
        copy_tree(source, os.open(folder, os.O_RDONLY))
    return 0


def copy_tree(source: int, target: int, *, is_overlay: bool = False, depth: int = 0) -> None:
    """Copy the contents of one folder into another, empty one.

    Args:
        source: Descriptor of the folder to copy.
        target: Descriptor of the empty folder.
        is_overlay: Whether to copy the marks of an overlay file system, whose upper layer this is:
            devices 0:0, which stand for deleted files, and attributes `user.*`.
        depth: Levels above these folders.

    Raises:
        OSError: The target is too small, or folders nest more than 128 deep.
    """
    if depth > _MAX_FOLDER_DEPTH:
        raise OSError(errno.ELOOP, f"folders nested more than {_MAX_FOLDER_DEPTH} deep")
    with os.scandir(source) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            _copy_entry(entry.name, info, source, target, is_overlay, depth)
    if is_overlay:
        _copy_attributes(source, target)
    info = os.fstat(source)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_attributes(source: int, target: int) -> None:
    for name in os.listxattr(source):
        if name.startswith("user."):
            os.setxattr(target, name, os.getxattr(source, name))


def _copy_entry(
    name: str, info: os.stat_result, source: int, target: int, is_overlay: bool, depth: int
) -> None:
    if stat.S_ISDIR(info.st_mode):
        os.mkdir(name, 0o700, dir_fd=target)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with contextlib.ExitStack() as stack:
            subfolders = [os.open(name, flags, dir_fd=folder) for folder in (source, target)]
            for fd in subfolders:
                stack.callback(os.close, fd)
            copy_tree(*subfolders, is_overlay=is_overlay, depth=depth + 1)
        return
    times = (info.st_atime_ns, info.st_mtime_ns)
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISREG(info.st_mode):
        _copy_file(name, info, source, target, is_overlay)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(name, 0o600, dir_fd=target)
        os.chmod(name, stat.S_IMODE(info.st_mode), dir_fd=target)  # mkfifo applies the umask
    elif is_overlay and stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        return
    else:
        return
    os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)


def _copy_file(name: str, info: os.stat_result, source: int, target: int, is_overlay: bool) -> None:
    source_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source)
    target_fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    try:
        end = 0
        while (start := _next_data_offset(source_fd, end)) is not None:
            end = os.lseek(source_fd, start, os.SEEK_HOLE)
            _copy_range(source_fd, target_fd, start, end)
        os.ftruncate(target_fd, info.st_size)
        if is_overlay:
            _copy_attributes(source_fd, target_fd)
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

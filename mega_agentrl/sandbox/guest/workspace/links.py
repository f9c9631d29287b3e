"""Refuses hard links to git, which checks what an overlay file system cannot keep.

The first hard link to a file of a lower layer copies the file to the upper one, so that the link
has another device and inode number than the file had. A local `git clone` compares them and ends
with "hardlink different from source". Where it can make no link it copies. So the kernel asks about
each link, and git is told that the file is on another device; all other programs get their links.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import PurePosixPath

from mega_agentrl.sandbox.guest import syscalls

_GONE = (errno.ENOENT, errno.EINTR)
"""Errors if the process that asks has ended."""
_GIT = ("git", "git-clone")
_LOCAL = {b"-l", b"--local"}
"""Options with which `git clone` fails where it can make no link."""
_MAX_COMMAND_BYTES = 1 << 16


class LinkListener:
    """Answers whether a process of the workspace may make a hard link.

    Attributes:
        fd: Descriptor that can be read when a process asks; -1 if all links are made, because a
            filter outside the sandbox has the one listener that the kernel permits.
    """

    def __init__(self) -> None:
        try:
            self.fd = syscalls.listen_to_links()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self.fd = -1

    def answer(self) -> None:
        """Answer one question."""
        question = bytearray(syscalls.NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(self.fd, syscalls.SECCOMP_NOTIF_RECV, question)
            cookie, pid, *_ = syscalls.unpack_notification(question)
            answer = syscalls.pack_response(
                cookie, error=errno.EXDEV if _copies_instead(pid) else 0
            )
            fcntl.ioctl(self.fd, syscalls.SECCOMP_NOTIF_SEND, answer)
        except OSError as error:
            if error.errno not in _GONE:
                raise


def _copies_instead(pid: int) -> bool:
    """Return whether a process is git, which makes copies unless it was told to make links."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            program, *arguments = file.read(_MAX_COMMAND_BYTES).split(b"\0")
    except OSError:
        return False
    return PurePosixPath(os.fsdecode(program)).name in _GIT and not _LOCAL & {*arguments}

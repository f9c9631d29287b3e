"""System calls that Python has no function for. Each raises an `OSError` that names the call.

`clone` creates a child in new namespaces even in a process with threads, for which `unshare`
refuses a user namespace. Like glibc's `fork` it sets the C library's record of the child's thread
id and runs Python's fork handlers; it does not run handlers of `pthread_atfork`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from itertools import starmap
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID = 0x2
MS_NOSUID_NODEV = 0x2 | 0x4
MS_NOEXEC = 0x8

INTERPRETER_NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
"""Namespaces that every interpreter has."""

_CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_CHILD_SETTID = 0x01000000
_IFF_UP = 1
_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_SIOCSIFFLAGS = 0x8914
_MNT_DETACH = 2
_MS_BIND = 0x1000
_MS_REC = 0x4000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_TID_ADDRESS = 40
_CAPABILITY_VERSION = 0x20080522
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3
_INSTRUCTION_BYTES = 8

HOST_IDS = (os.getuid(), os.getgid())
"""User and group id as the supervisor sees them; every nested namespace keeps the numbers."""

# Numbers of clone and seccomp; clone's last two arguments swap places on 64-bit ARM.
_SYSCALL_NUMBERS = {"x86_64": (56, 317), "aarch64": (220, 277)}
CLONE_NUMBER, _SECCOMP_NUMBER = _SYSCALL_NUMBERS.get(platform.machine(), (-1, -1))

_PIVOT_ROOT_NUMBER = {"x86_64": 155, "aarch64": 41}.get(platform.machine(), -1)

_SENDMSG_NUMBERS = {"x86_64": (46, 307), "aarch64": (211, 269)}.get(platform.machine(), ())
"""Numbers of sendmsg and sendmmsg."""

_LINK_NUMBERS = {"x86_64": (86, 265), "aarch64": (37,)}.get(platform.machine(), ())
"""Numbers of link and linkat."""

_RETURN_ERROR = 0x00050000
_RETURN_NOTIFY = 0x7FC00000
_RETURN_ALLOW = 0x7FFF0000

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL during calls
_libpython = ctypes.PyDLL(None)  # keeps the GIL, and the error number of the last call of libc


class _SockFprog(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def check_status(status: int, what: str) -> int:
    """Return `status`; raises `OSError` if it is negative."""
    if status < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return status


def clone_flags_register(flags: int) -> int:
    """Return the value that `clone(flags)` passes in its first register."""
    return flags | signal.SIGCHLD | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child, else its process id."""
    address = ctypes.c_void_p()
    check_status(
        libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0), "thread id address"
    )
    child_tid, tls = ctypes.c_void_p(address.value), ctypes.c_void_p(0)
    last = (tls, child_tid) if platform.machine() == "aarch64" else (child_tid, tls)
    register = ctypes.c_ulong(clone_flags_register(flags))
    null = ctypes.c_void_p(0)
    call = _libc_with_gil.syscall
    call.restype = ctypes.c_long
    number = ctypes.c_long(CLONE_NUMBER)
    before_fork = starmap(_libpython.PyOS_BeforeFork, [()])
    forks = starmap(call, [(number, register, null, null, *last)])
    after_fork_in_child = starmap(_libpython.PyOS_AfterFork_Child, [()])
    after_fork_in_parent = starmap(_libpython.PyOS_AfterFork_Parent, [()])
    # Unpacked, not called: after a call Python may hand the GIL to another thread. The child has no
    # other threads and would wait for it forever; in the parent a thread that starts or ends
    # another one keeps the GIL while it waits for a lock that PyOS_BeforeFork holds from 3.13 on.
    (_,) = before_fork
    (pid,) = forks
    if pid == 0:
        (_,) = after_fork_in_child
        return 0
    (_,) = after_fork_in_parent
    return check_status(pid, "clone into new namespaces")


def ptrace(request: int, thread: int, data: int) -> None:
    """Make a request about a thread, with the address 0."""
    check_status(libc.ptrace(request, thread, None, data), f"ptrace request {request:#x}")


def setns(fd: int, flags: int) -> None:
    """Enter the namespace that `fd` refers to."""
    check_status(libc.setns(fd, flags), "setns")


def mount(kind: str, folder: str, flags: int, options: str = "") -> None:
    """Mount a file system of type `kind` on `folder`."""
    text = options.encode() if options else None
    name = kind.encode()
    status = libc.mount(name, folder.encode(), name, ctypes.c_ulong(flags), text)
    check_status(status, f"mount {kind} on {folder}")


def bind_mount(source: str, folder: str, *, recursive: bool = False) -> None:
    """Mount the folder `source` also on `folder`."""
    flags = _MS_BIND | (_MS_REC if recursive else 0)
    status = libc.mount(source.encode(), folder.encode(), None, ctypes.c_ulong(flags), None)
    check_status(status, f"bind {source} to {folder}")


def unmount_lazily(folder: str) -> None:
    """Unmount a folder; what still uses it keeps it."""
    check_status(libc.umount2(folder.encode(), _MNT_DETACH), f"unmount {folder}")


def pivot_root(folder: str) -> None:
    """Make the mount point `folder` the root and the working folder, and unmount the old root."""
    os.chdir(folder)
    status = libc.syscall(_PIVOT_ROOT_NUMBER, b".", b".")
    check_status(status, f"make {folder} the root")
    unmount_lazily(".")  # the old root, which now lies over the new one
    os.chdir("/")


def set_dumpable(is_dumpable: bool) -> None:
    """Set whether processes of the same user may read this process's memory and descriptors."""
    check_status(libc.prctl(_PR_SET_DUMPABLE, int(is_dumpable), 0, 0, 0), "set dumpable")


def map_own_ids(pid: str = "self") -> None:
    """Map our user and group id to themselves in the new user namespace of process `pid`."""
    lines = (("setgroups", "deny"), ("uid_map", _identity_map_line(HOST_IDS[0])))
    for name, text in (*lines, ("gid_map", _identity_map_line(HOST_IDS[1]))):
        with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _identity_map_line(number: int) -> str:
    return f"{number} {number} 1"


def bring_up_loopback() -> None:
    """Bring up the loopback interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def collapse_to_huge_pages() -> int:
    """Move this process's private anonymous memory to huge pages; return how many MiB were moved.

    Nothing changes where the kernel cannot do it (before 6.1, or switched off).
    """
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        lines = file.read().splitlines()
    num_bytes = 0
    for line in lines:
        ends, rights, _, _, inode, *name = line.split()
        if inode != "0" or rights != "rw-p" or name not in ([], ["[heap]"]):
            continue
        low, high = (int(end, 16) for end in ends.split("-"))
        first, last = -(-low // _HUGE_BYTES) * _HUGE_BYTES, high // _HUGE_BYTES * _HUGE_BYTES
        if first < last:
            size = last - first
            status = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_COLLAPSE)
            num_bytes += 0 if status else size
    return num_bytes >> 20


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that forked it ends."""
    check_status(libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "parent-death signal")


def set_hard_limit(kind: int, value: int) -> None:
    """Set both limits of a resource to `value`, or to the hard limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    check_status(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "adopt orphans")


def drop_capabilities() -> None:
    """Give up every capability for good."""
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    check_status(libc.capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")


def install_seccomp_filter(program: bytes, *, listener: bool) -> int:
    """Filter this process's system calls from now on.

    Args:
        program: The filter as BPF, 8 bytes per instruction.
        listener: Whether to create a listener for notifications.

    Returns:
        The listener's descriptor, or 0.
    """
    check_status(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = _SockFprog(len(program) // _INSTRUCTION_BYTES, ctypes.addressof(buffer))
    flags = _SECCOMP_FILTER_FLAG_NEW_LISTENER if listener else 0
    status: int = libc.syscall(
        _SECCOMP_NUMBER, _SECCOMP_SET_MODE_FILTER, ctypes.c_ulong(flags), ctypes.byref(sock_fprog)
    )
    return check_status(status, "install the system call filter")


def deny_sendmsg() -> None:
    """Let sendmsg and sendmmsg, which can pass descriptors, fail with EPERM from now on.

    This is a second filter, because an interpreter passes the listener of the first one to its
    supervisor. Descriptors in flight count against the limit of the user, whom all sessions of a
    sandbox share, and a descriptor that the supervisor received could block it when it is closed.
    """
    program = _filter_of_calls(_SENDMSG_NUMBERS, _RETURN_ERROR | errno.EPERM)
    install_seccomp_filter(program, listener=False)


def listen_to_links() -> int:
    """Let the kernel ask about each hard link from now on; return the listener's descriptor."""
    program = _filter_of_calls(_LINK_NUMBERS, _RETURN_NOTIFY)
    return install_seccomp_filter(program, listener=True)


def _filter_of_calls(numbers: tuple[int, ...], action: int) -> bytes:
    """Return a filter with an action for these system calls, which allows all others.

    It is for processes whose first filter refuses foreign system call tables, so that the number
    alone decides.
    """
    instruction = struct.Struct("HBBI")
    program = [instruction.pack(0x20, 0, 0, 0)]  # load the number
    for index, number in enumerate(numbers):
        # If equal, skip the other comparisons and the instruction that allows the call.
        program.append(instruction.pack(0x15, len(numbers) - index, 0, number))
    program.append(instruction.pack(0x06, 0, 0, _RETURN_ALLOW))
    program.append(instruction.pack(0x06, 0, 0, action))
    return b"".join(program)


class _Hidden:
    """A descriptor that hides an attribute of a class and its objects."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__}.sendmsg is not permitted in the sandbox")


def hide_sendmsg() -> None:
    """Hide `socket.socket.sendmsg`, as on a system that lacks it.

    Libraries then use something else: asyncio writes with `send`, and multiprocessing does not
    offer forkserver, which passes descriptors. Call this before any of them is imported.
    """
    socket.socket.sendmsg = _Hidden()  # type: ignore[assignment,method-assign]


_NOTIFICATION = struct.Struct("QIIiIQ6Q")
_RESPONSE = struct.Struct("QqiI")
NOTIFICATION_BYTES = _NOTIFICATION.size
SECCOMP_NOTIF_RECV = 0xC0000000 | (_NOTIFICATION.size << 16) | (ord("!") << 8)
SECCOMP_NOTIF_SEND = 0xC0000000 | (_RESPONSE.size << 16) | (ord("!") << 8) | 1


def unpack_notification(buffer: bytes | bytearray) -> tuple[int, int, int, int]:
    """Return cookie, process id, system call number and first argument of a notification."""
    cookie, pid, _, number, _, _, first, *_ = _NOTIFICATION.unpack(buffer)
    return cookie, pid, number, first


def pack_response(cookie: int, *, error: int) -> bytearray:
    """Return the response to a notification: `error`, or 0 to let the call continue."""
    return bytearray(_RESPONSE.pack(cookie, 0, -error, 0 if error else 1))

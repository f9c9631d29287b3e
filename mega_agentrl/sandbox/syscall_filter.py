"""The seccomp filter: which system calls the policy's code may not make.

It is a deny list, because an allow list would have to follow every library that the policy may
import. Like the filters of Docker, Flatpak and bubblewrap's examples, it denies with EPERM: mounts
and namespaces, tracing and other processes' memory, keys, BPF, performance counters, io_uring,
modules, clocks, accounting, inotify (its instances count per user), contexts of asynchronous I/O
(they count for the whole machine) and unusual families and types of sockets. The interpreter adds a
second filter against passing descriptors (`guest.syscalls.deny_sendmsg`). clone3 returns ENOSYS, so
that the C library falls back to clone, whose flags a filter can inspect. System calls above
`_MAX_KNOWN_SYSCALL` and calls of a foreign architecture return ENOSYS. The limits of processes and
CPU time cannot be changed, and, where process 1 is ours, neither can its limits and priorities,
which later calls would inherit.

In a stateful sandbox the kernel asks the supervisor about a clone with namespace flags or
CLONE_UNTRACED (`guest.interpreter_manager`); in a stateless one it is denied.
"""

from __future__ import annotations

import base64
import errno
import platform
import resource
import socket
import struct
import tempfile
from functools import cache
from typing import Any

from mega_agentrl.errors import InputError

_REFERRED_CLONE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000
_REFERRED_CLONE_FLAGS |= 0x40000000 | 0x00800000
"""All new namespaces, and CLONE_UNTRACED, which would hide a child from `guest.clone_tracer`."""

_MAX_KNOWN_SYSCALL = 462  # mseal, Linux 6.10; the numbers from 424 on are the same everywhere
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
_INT_MASK = 0xFFFFFFFF

DENIED_SYSCALLS = (
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "quotactl", "quotactl_fd"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp"),
    *("pidfd_getfd", "bpf", "perf_event_open", "userfaultfd", "lookup_dcookie"),
    *("keyctl", "add_key", "request_key", "io_uring_setup", "io_uring_enter"),
    *("io_uring_register", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
    *("delete_module", "swapon", "swapoff", "reboot", "acct", "settimeofday", "clock_settime"),
    *("clock_adjtime", "adjtimex", "stime", "open_by_handle_at", "name_to_handle_at"),
    *("fanotify_init", "sethostname", "setdomainname", "syslog", "vhangup", "nfsservctl"),
    *("inotify_init", "inotify_init1", "io_setup"),
    *("iopl", "ioperm", "modify_ldt", "_sysctl", "uselib", "ustat", "sysfs"),
    *("mbind", "set_mempolicy", "migrate_pages", "move_pages", "set_mempolicy_home_node"),
)
_ALLOWED_SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_ALLOWED_SOCKET_TYPES = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)
_SOCKET_TYPE_MASK = 0xF
_LOCKED_LIMITS = (resource.RLIMIT_NPROC, resource.RLIMIT_CPU)

_PRIORITY_CALLS = {"setpriority": (0, 1, 2), "ioprio_set": (1, 2, 3)}
"""Calls that set priorities, with their numbers for a process, a process group and a user."""
_SCHEDULING_CALLS = ("sched_setscheduler", "sched_setparam", "sched_setattr", "sched_setaffinity")


@cache
def build_seccomp_filter(*, stateful: bool, protects_process_1: bool = False) -> bytes:
    """Return the filter as a BPF program, 8 bytes per instruction.

    Args:
        stateful: Whether the kernel asks about a clone with namespace flags.
        protects_process_1: Whether limits and priorities of process 1 cannot be changed, because it
            runs no code of the policy.

    Raises:
        ValueError: libseccomp is missing or the machine's architecture is not supported.
    """
    if platform.machine() not in ("x86_64", "aarch64"):
        raise InputError("machine of the sandbox", platform.machine(), "x86_64 or aarch64")
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            "libseccomp",
            str(error),
            "a library that can be loaded",
            "the system package `libseccomp2` is not installed (apt-get install libseccomp2)",
        ) from error
    seccomp_filter = seccomp.SyscallFilter(seccomp.ALLOW)
    seccomp_filter.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.ERRNO(errno.ENOSYS))
    deny_action = seccomp.ERRNO(errno.EPERM)
    for name in DENIED_SYSCALLS:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # else this architecture does not have it
            seccomp_filter.add_rule(deny_action, number)
    seccomp_filter.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    clone_action = seccomp.NOTIFY if stateful else deny_action
    for bit in range(32):
        if _REFERRED_CLONE_FLAGS >> bit & 1:
            flag = 1 << bit
            seccomp_filter.add_rule(
                clone_action, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag)
            )
    _add_argument_rules(seccomp_filter, seccomp, deny_action)
    if protects_process_1:
        _add_process_1_rules(seccomp_filter, seccomp, deny_action)
    with tempfile.TemporaryFile() as file:
        seccomp_filter.export_bpf(file)
        file.seek(0)
        return _unknown_syscall_prologue() + file.read()


def _add_argument_rules(seccomp_filter: Any, seccomp: Any, deny_action: int) -> None:
    refused_families = [
        family
        for family in range(max(_ALLOWED_SOCKET_FAMILIES))
        if family not in _ALLOWED_SOCKET_FAMILIES
    ]
    for call in ("socket", "socketpair"):
        seccomp_filter.add_rule(
            deny_action, call, seccomp.Arg(0, seccomp.GT, max(_ALLOWED_SOCKET_FAMILIES))
        )
        for family in refused_families:
            seccomp_filter.add_rule(deny_action, call, seccomp.Arg(0, seccomp.EQ, family))
        for kind in set(range(_SOCKET_TYPE_MASK + 1)) - set(_ALLOWED_SOCKET_TYPES):
            condition = seccomp.Arg(1, seccomp.MASKED_EQ, _SOCKET_TYPE_MASK, kind)
            seccomp_filter.add_rule(deny_action, call, condition)
    for limit in _LOCKED_LIMITS:
        condition = seccomp.Arg(0, seccomp.MASKED_EQ, _INT_MASK, limit)
        seccomp_filter.add_rule(deny_action, "setrlimit", condition)
        condition = seccomp.Arg(1, seccomp.MASKED_EQ, _INT_MASK, limit)
        seccomp_filter.add_rule(deny_action, "prlimit64", condition, seccomp.Arg(2, seccomp.NE, 0))
    for request in (_TIOCSTI, _TIOCLINUX):
        condition = seccomp.Arg(1, seccomp.MASKED_EQ, _INT_MASK, request)
        seccomp_filter.add_rule(deny_action, "ioctl", condition)
    # Only the query (all bits set) is allowed: deny every value with some bit clear.
    for bit in range(32):
        seccomp_filter.add_rule(
            deny_action, "personality", seccomp.Arg(0, seccomp.MASKED_EQ, 1 << bit, 0)
        )


def _add_process_1_rules(seccomp_filter: Any, seccomp: Any, deny_action: int) -> None:
    def equals(argument: int, value: int) -> Any:
        return seccomp.Arg(argument, seccomp.MASKED_EQ, _INT_MASK, value)

    changes = seccomp.Arg(2, seccomp.NE, 0)
    seccomp_filter.add_rule(deny_action, "prlimit64", equals(0, 1), changes)
    for call in _SCHEDULING_CALLS:
        seccomp_filter.add_rule(deny_action, call, equals(0, 1))
    for call, (process, group, user) in _PRIORITY_CALLS.items():
        for kind in (process, group):
            seccomp_filter.add_rule(deny_action, call, equals(0, kind), equals(1, 1))
        seccomp_filter.add_rule(deny_action, call, equals(0, user))


def _unknown_syscall_prologue() -> bytes:
    """Return instructions to put before libseccomp's, which return ENOSYS for newer calls."""
    return_action = 0x00050000 | errno.ENOSYS
    return (
        struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number
        + struct.pack(
            "HBBI", 0x25, 0, 1, _MAX_KNOWN_SYSCALL
        )  # if greater: next instruction, else skip it
        + struct.pack("HBBI", 0x06, 0, 0, return_action)
    )


def seccomp_filter_base64(*, stateful: bool, protects_process_1: bool = False) -> str:
    """Return `build_seccomp_filter` as base64 text."""
    program = build_seccomp_filter(stateful=stateful, protects_process_1=protects_process_1)
    return base64.b64encode(program).decode("ascii")

"""Which system calls the policy's code may not make.

Everything else is allowed: a list of what is needed would have to follow every library the
policy may import. Denied (EPERM) is what Docker, Flatpak and bubblewrap's own examples deny:
mounts and namespaces, tracing and other processes' memory, keys, BPF, performance counters,
io_uring, modules, clocks, accounting, foreign socket families. clone3 answers ENOSYS, so that
the C library falls back to clone, whose flags can be looked at. Calls newer than those known
here and calls of a foreign architecture answer ENOSYS. The limits of processes and CPU time
cannot be changed.

In a stateful sandbox, a clone with namespace flags is a question to the supervisor (see
`inner.cells`); everywhere else it is denied.
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

_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000
_NAMESPACES |= 0x40000000
_NEWEST = 462  # mseal, Linux 6.10; the numbers from 424 on are the same everywhere
_READ_PERSONALITY = 0xFFFFFFFF
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
_INT_MASK = 0xFFFFFFFF

DENIED = (
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "quotactl", "quotactl_fd"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp"),
    *("pidfd_getfd", "bpf", "perf_event_open", "userfaultfd", "lookup_dcookie"),
    *("keyctl", "add_key", "request_key", "io_uring_setup", "io_uring_enter"),
    *("io_uring_register", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
    *("delete_module", "swapon", "swapoff", "reboot", "acct", "settimeofday", "clock_settime"),
    *("clock_adjtime", "adjtimex", "stime", "open_by_handle_at", "name_to_handle_at"),
    *("fanotify_init", "sethostname", "setdomainname", "syslog", "vhangup", "nfsservctl"),
    *("iopl", "ioperm", "modify_ldt", "_sysctl", "uselib", "ustat", "sysfs"),
    *("mbind", "set_mempolicy", "migrate_pages", "move_pages", "set_mempolicy_home_node"),
)
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_LOCKED_LIMITS = (resource.RLIMIT_NPROC, resource.RLIMIT_CPU)


@cache
def filter_program(*, stateful: bool) -> bytes:
    """The filter as BPF, 8 bytes an instruction.

    Raises `ValueError` where libseccomp is missing or the machine is of another kind.
    """
    if platform.machine() not in ("x86_64", "aarch64"):
        raise ValueError(f"sandbox: machine {platform.machine()}, expected x86_64 or aarch64")
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise ValueError(
            f"sandbox: libseccomp cannot be loaded ({error}); install the system package "
            "`libseccomp2` (apt-get install libseccomp2)"
        ) from error
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.ERRNO(errno.ENOSYS))
    denied = seccomp.ERRNO(errno.EPERM)
    for name in DENIED:
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # else not a call of this machine
            rules.add_rule(denied, number)
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    spaces = seccomp.NOTIFY if stateful else denied
    for bit in range(32):
        if _NAMESPACES >> bit & 1:
            flag = 1 << bit
            rules.add_rule(spaces, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    _add_argument_rules(rules, seccomp, denied)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return _only_known() + file.read()


def _add_argument_rules(rules: Any, seccomp: Any, denied: int) -> None:
    refused = [family for family in range(max(_FAMILIES)) if family not in _FAMILIES]
    for call in ("socket", "socketpair"):
        rules.add_rule(denied, call, seccomp.Arg(0, seccomp.GT, max(_FAMILIES)))
        for family in refused:
            rules.add_rule(denied, call, seccomp.Arg(0, seccomp.EQ, family))
    for limit in _LOCKED_LIMITS:
        equal = seccomp.Arg(0, seccomp.MASKED_EQ, _INT_MASK, limit)
        rules.add_rule(denied, "setrlimit", equal)
        equal = seccomp.Arg(1, seccomp.MASKED_EQ, _INT_MASK, limit)
        rules.add_rule(denied, "prlimit64", equal, seccomp.Arg(2, seccomp.NE, 0))
    for request in (_TIOCSTI, _TIOCLINUX):
        equal = seccomp.Arg(1, seccomp.MASKED_EQ, _INT_MASK, request)
        rules.add_rule(denied, "ioctl", equal)
    # Reading is allowed: all ones. Any other value differs in some bit.
    for bit in range(32):
        rules.add_rule(denied, "personality", seccomp.Arg(0, seccomp.MASKED_EQ, 1 << bit, 0))


def _only_known() -> bytes:
    """Three instructions ahead of libseccomp's: a number above the known answers ENOSYS."""
    refuse = 0x00050000 | errno.ENOSYS
    return (
        struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number
        + struct.pack("HBBI", 0x25, 0, 1, _NEWEST)  # greater than: next, else skip one
        + struct.pack("HBBI", 0x06, 0, 0, refuse)
    )


def encoded_filter(*, stateful: bool) -> str:
    """`filter_program` as text."""
    return base64.b64encode(filter_program(stateful=stateful)).decode("ascii")

"""System calls outside the filter: each works without isolation and is refused with it.

Every call is made by a child of its own, so that one that is answered by a signal is one line
of the table like the others. Arguments are such that a call that is let through does no harm:
refusal shows as EPERM or ENOSYS, being let through as success or as an error about arguments.
"""

import asyncio
import json
import os
import platform

import pyseccomp
import pytest

from tests.escape.outside import outside, with_values

RUN = """
import ctypes, json, mmap, os, socket
libc = ctypes.CDLL(None, use_errno=True)
page = ctypes.addressof(ctypes.c_char.from_buffer(mmap.mmap(-1, 1 << 16)))

def argument(value):
    if value == 'page':
        return ctypes.c_void_p(page)
    if value == 'self':
        return ctypes.c_long(os.getpid())
    return ctypes.c_char_p(value.encode()) if isinstance(value, str) else ctypes.c_long(value)

def attempt(number, values):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = libc.syscall(ctypes.c_long(number), *map(argument, values))
        os.write(writer, str(ctypes.get_errno() if status < 0 else 0).encode())
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 10)
    os.close(reader)
    os.waitpid(pid, 0)
    return int(said) if said else -1  # -1: ended by a signal

print(json.dumps({name: attempt(number, values) for name, number, values in calls}))
"""

NEW_USER, NEW_NS, NEW_PID, NEW_NET = 0x10000000, 0x00020000, 0x20000000, 0x40000000
NOWHERE = "/nowhere"

ANYBODY = {
    "unshare user": ("unshare", NEW_USER),
    "unshare user mount": ("unshare", NEW_USER | NEW_NS),
    "clone user": ("clone", NEW_USER | 17, 0, 0, 0, 0),
    "clone user net": ("clone", NEW_USER | NEW_NET | 17, 0, 0, 0, 0),
    "clone3": ("clone3", "page", 64),
    "setns": ("setns", -1, 0),
    "ptrace": ("ptrace", 0, 0, 0, 0),
    "process_vm_readv": ("process_vm_readv", "self", "page", 0, "page", 0, 0),
    "process_vm_writev": ("process_vm_writev", "self", "page", 0, "page", 0, 0),
    "kcmp": ("kcmp", "self", "self", 1, 0, 0),
    "userfaultfd": ("userfaultfd", 1),
    "add_key": ("add_key", "user", "name", "x", 1, -2),
    "request_key": ("request_key", "user", "none", "", -2),
    "keyctl": ("keyctl", 0, -2, 1),
    "io_uring_setup": ("io_uring_setup", 1, "page"),
    "io_uring_enter": ("io_uring_enter", -1, 0, 0, 0, 0, 0),
    "io_uring_register": ("io_uring_register", -1, 0, 0, 0),
    "personality": ("personality", 0x0040000),
    "name_to_handle_at": ("name_to_handle_at", -100, NOWHERE, "page", "page", 0),
    "perf_event_open": ("perf_event_open", "page", 0, -1, -1, 0),
    "inotify_init": ("inotify_init", 0),
    "inotify_init1": ("inotify_init1", 0),
    "socket netlink": ("socket", 16, 3, 0),
    "socket alg": ("socket", 38, 5, 0),
    "socket vsock": ("socket", 40, 1, 0),
    "quotactl": ("quotactl", 0x800001 << 8, NOWHERE, 0, "page"),
}
ROOT = {
    "socket raw": ("socket", 2, 3, 1),
    "socket raw, nonblocking": ("socket", 2, 3 | 0o4000, 1),
    "socket raw 6": ("socket", 10, 3, 58),
    "socket packet by type": ("socket", 2, 10, 768),
    "mount": ("mount", NOWHERE, NOWHERE, "tmpfs", 0, 0),
    "umount2": ("umount2", NOWHERE, 0),
    "pivot_root": ("pivot_root", NOWHERE, NOWHERE),
    "chroot": ("chroot", NOWHERE),
    "open_tree": ("open_tree", -100, NOWHERE, 1),
    "move_mount": ("move_mount", -100, NOWHERE, -100, NOWHERE, 0),
    "fsopen": ("fsopen", "tmpfs", 0),
    "fsmount": ("fsmount", -1, 0, 0),
    "fspick": ("fspick", -100, NOWHERE, 0),
    "mount_setattr": ("mount_setattr", -100, NOWHERE, 0, "page", 32),
    "open_by_handle_at": ("open_by_handle_at", -1, "page", 0),
    "bpf": ("bpf", 0, "page", 32),
    "kexec_load": ("kexec_load", 0, 0, 0, -1),
    "init_module": ("init_module", "page", 0, ""),
    "finit_module": ("finit_module", -1, "", 0),
    "delete_module": ("delete_module", "nowhere", 0),
    "swapon": ("swapon", NOWHERE, 0),
    "swapoff": ("swapoff", NOWHERE),
    "reboot": ("reboot", 0, 0, 0, 0),
    "acct": ("acct", NOWHERE),
    "settimeofday": ("settimeofday", 0, 0),
    "clock_settime": ("clock_settime", 99, "page"),
    "sethostname": ("sethostname", "page", -1),
    "setdomainname": ("setdomainname", "page", -1),
    "syslog": ("syslog", 10, 0, 0),
    "fanotify_init": ("fanotify_init", 0, 0),
    "socket packet": ("socket", 17, 3, 0),
}
ALLOWED = {
    "getpid": ("getpid",),
    "socket unix": ("socket", 1, 1, 0),
    "socket inet": ("socket", 2, 1, 0),
    "clone": ("clone", 17, 0, 0, 0, 0),
    "memfd_create": ("memfd_create", "name", 0),
    "personality read": ("personality", 0xFFFFFFFF),
}
EPERM, ENOSYS, AFNOSUPPORT = 1, 38, 97
TABLE = ANYBODY | ROOT


def encoded(table):
    rows = []
    for name, (call, *values) in table.items():
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)
        if number >= 0:
            rows.append((name, number, values))
    return with_values(RUN, calls=rows)


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    """Error number of every call without isolation."""
    code = encoded(TABLE | ALLOWED)
    return json.loads(outside(code, tmp_path_factory.mktemp("outside")))


@pytest.fixture(scope="module", params=["stateless", "stateful"])
def held(request, stateless_pool, pool):
    """Error number of every call in the sandbox."""
    chosen = pool if request.param == "stateful" else stateless_pool
    return json.loads(asyncio.run(chosen.run(encoded(TABLE | ALLOWED))).output)


@pytest.mark.parametrize("name", TABLE)
def test_system_calls_that_reach_out_of_the_sandbox_are_refused(free, held, name):
    if name in ROOT and os.getuid():
        pytest.skip("takes root outside too")
    if name not in free or free[name] in (ENOSYS, AFNOSUPPORT):
        pytest.skip("not in this kernel")
    assert free[name] != EPERM, "the attack does not work outside"
    assert held[name] in (EPERM, ENOSYS), f"errno {held[name]}"


@pytest.mark.parametrize("name", ALLOWED)
def test_system_calls_that_programs_need_are_allowed(free, held, name):
    assert (free[name], held[name]) == (0, 0)


FOREIGN = """
import ctypes, mmap, os
# mov eax, number; int 0x80; ret: the 32-bit table, whose numbers mean other calls.
def call(number):
    code = b'\\xb8' + number.to_bytes(4, 'little') + b'\\xcd\\x80\\xc3'
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return function()
print('pid', call(20) == os.getpid())
"""

X32 = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
status = libc.syscall(ctypes.c_long(0x40000000 | 272), ctypes.c_long(0x10000000))
print(status, ctypes.get_errno())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="two tables in one kernel")
async def test_calls_by_the_table_of_another_architecture_are_refused(target, tmp_path):
    if outside(FOREIGN, tmp_path) != "pid True":
        pytest.skip("a kernel without 32-bit calls")
    result = await target.attack(FOREIGN)
    assert result.output != "pid True"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="two tables in one kernel")
async def test_calls_by_the_x32_table_are_refused(target):
    result = await target.attack(X32)
    assert result.output in (f"-1 {EPERM}", f"-1 {ENOSYS}") or "signal" in result.output


async def test_the_filter_cannot_be_taken_off(target, tmp_path):
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.prctl(38, 0, 0, 0, 0)\n"
        "libc.prctl(22, 0, 0, 0, 0)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(*(line.split()[1] for line in lines if line.startswith(('NoNewPrivs', 'Seccomp:'))))"
    )
    assert outside(code, tmp_path) == "0 0"
    assert (await target.attack(code)).output == "1 2"

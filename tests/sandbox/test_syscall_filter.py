"""The filter: what the kernel answers to calls made by ctypes inside, and where it is refused."""

import builtins
import errno
import json
import platform

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.sandbox import syscall_filter
from mega_agentrl.sandbox.syscall_filter import (
    DENIED_SYSCALLS,
    build_seccomp_filter,
    seccomp_filter_base64,
)
from tests.sandbox.sandboxes import STATEFUL, shared_pool

NEW_USER, NEW_NET, CHILD = 0x10000000, 0x40000000, 17

PROBE = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
answers = []
for number, arguments in {calls}:
    ctypes.set_errno(0)
    status = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(a) for a in arguments])
    if number == {clone} and status == 0:
        libc._exit(0)
    answers.append(0 if status >= 0 else ctypes.get_errno())
print(json.dumps(answers))
"""


@pytest.fixture(scope="module", params=[{}, STATEFUL], ids=["once", "session"])
def pool(request):
    yield from shared_pool(**request.param)


def number(name):
    import pyseccomp

    return pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)


async def answers(pool, calls):
    result = await pool.run(PROBE.format(calls=calls, clone=number("clone")))
    return json.loads(result.output)


async def test_every_denied_call_is_not_permitted(pool):
    known = [name for name in DENIED_SYSCALLS if number(name) >= 0]
    got = await answers(pool, [(number(name), [0] * 6) for name in known])
    wrong = {name: errno.errorcode.get(code) for name, code in zip(known, got, strict=True)}
    assert {name: code for name, code in wrong.items() if code != "EPERM"} == {}


async def test_arguments_decide_which_calls_are_permitted(pool):
    null = [0] * 5
    table = [
        ("clone", [NEW_USER | CHILD, *null], errno.EPERM),
        ("clone", [NEW_NET | CHILD, *null], errno.EPERM),
        ("clone", [CHILD, *null], 0),
        ("clone3", [0, 0], errno.ENOSYS),
        ("socket", [16, 3, 0], errno.EPERM),  # netlink
        ("socket", [40, 1, 0], errno.EPERM),  # vsock
        ("socket", [17, 3, 0], errno.EPERM),  # packet
        ("socket", [2, 3, 1], errno.EPERM),  # raw
        ("socket", [2, 10, 768], errno.EPERM),  # packet, by its type
        ("socket", [2, 3 | 0o2000000, 1], errno.EPERM),  # with a flag
        ("socket", [1, 5 | 0o2000000, 0], 0),
        ("socket", [1, 1, 0], 0),
        ("socket", [2, 1, 0], 0),
        ("socket", [10, 1, 0], 0),
        ("personality", [0xFFFFFFFF], 0),
        ("personality", [0x0040000], errno.EPERM),
        ("setrlimit", [6, 0], errno.EPERM),  # processes
        ("setrlimit", [0, 0], errno.EPERM),  # CPU time
        ("setrlimit", [7, 0], errno.EFAULT),
        ("prlimit64", [0, 6, 8, 0], errno.EPERM),
        ("prlimit64", [0, 6, 0, 0], 0),
        ("sendmsg", [0, 0, 0], errno.EPERM),  # may pass descriptors
        ("sendmmsg", [0, 0, 0, 0], errno.EPERM),
        ("recvmsg", [0, 0, 0], errno.ENOTSOCK),
        ("getpid", [], 0),
    ]
    got = await answers(pool, [(number(name), arguments) for name, arguments, _ in table])
    assert got == [expected for *_, expected in table]


async def test_calls_unknown_here_do_not_exist(pool):
    got = await answers(pool, [(468, [0] * 6), (1000, [0] * 6), (0x40000000 + 39, [0] * 6)])
    assert got == [errno.ENOSYS] * 3  # the last is getpid of x86's 32-bit-pointer relative


def test_program_is_whole_instructions():
    for stateful in (False, True):
        program = build_seccomp_filter(stateful=stateful)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
    assert seccomp_filter_base64(stateful=False) != seccomp_filter_base64(stateful=True)


def test_missing_library_names_the_package(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name == "pyseccomp":
            raise RuntimeError("Unable to find libseccomp")
        return real(name, *rest, **more)

    syscall_filter.build_seccomp_filter.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError) as caught:
        build_seccomp_filter(stateful=False)
    assert caught.value.name == "libseccomp"
    assert "`libseccomp2`" in caught.value.cause


def test_another_machine_is_refused(monkeypatch):
    syscall_filter.build_seccomp_filter.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(InputError) as caught:
        build_seccomp_filter(stateful=False)
    assert caught.value.got == "s390x"

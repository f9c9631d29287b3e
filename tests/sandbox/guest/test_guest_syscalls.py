"""System calls by hand: layouts against the kernel's own numbers, the rest in child processes.

That filters hold and capabilities are gone is tested from inside: `test_interpreter`,
`test_syscall_filter`, `tests/escape`.
"""

import errno
import json
import os
import struct
import subprocess
import sys
import time

import pytest

from mega_agentrl.sandbox.guest import processes, syscalls

BEGIN = (
    "import json, os, signal, sys, threading, time\n"
    "from mega_agentrl.sandbox.guest import syscalls\n"
    "def say(**facts): print(json.dumps(facts), flush=True)\n"
    "def ended(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    "def tried(call, *arguments):\n"
    "    try: call(*arguments); return 0\n"
    "    except OSError as error: return error.errno\n"
)


def run_child(code):
    """The output of `code` in a child process, one JSON object a line."""
    command = [sys.executable, "-B", "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def user_namespaces():
    """Skips where the kernel or a container refuses them."""
    flags = syscalls.INTERPRETER_NAMESPACES
    code = f"pid = syscalls.clone({flags})\nif pid == 0: os._exit(tried(syscalls.map_own_ids))\n"
    done = subprocess.run(
        [sys.executable, "-B", "-c", f"{BEGIN}{code}sys.exit(ended(pid))"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        pytest.skip(f"user namespaces are not to be had here: {done.stderr.strip()[-200:]}")


def test_layouts_are_the_kernels():
    assert syscalls.SECCOMP_NOTIF_RECV == 0xC0502100
    assert syscalls.SECCOMP_NOTIF_SEND == 0xC0182101
    assert syscalls.clone_flags_register(syscalls.CLONE_NEWUSER) == 0x11200011
    head = struct.pack("=QIIiIQQ", 7 << 40, 123, 0, 56, 0xC000003E, 9, 0x7E020011)
    notification = head + struct.pack("=5Q", *[1] * 5)
    assert len(notification) == syscalls.NOTIFICATION_BYTES == 80
    assert syscalls.unpack_notification(notification) == (7 << 40, 123, 56, 0x7E020011)
    refused, let_go = (syscalls.pack_response(7 << 40, error=error) for error in (errno.EPERM, 0))
    assert bytes(refused) == struct.pack("=QqiI", 7 << 40, 0, -errno.EPERM, 0)
    assert bytes(let_go) == struct.pack("=QqiI", 7 << 40, 0, 0, 1)


def test_errors_name_the_failed_call():
    # An `OSError` has no attribute for the call; `strerror` holds it.
    with pytest.raises(OSError, match="mount nofs on /nowhere: ") as failed:
        syscalls.mount("nofs", "/nowhere", 0)
    assert failed.value.errno in (errno.ENOENT, errno.EPERM)
    with pytest.raises(OSError, match="setns: ") as failed:
        syscalls.setns(-1, 0)
    assert failed.value.errno == errno.EBADF
    with pytest.raises(OSError, match="clone into new namespaces: ") as failed:
        syscalls.clone(0x00010000)  # a thread, but not of our memory
    assert failed.value.errno == errno.EINVAL


def test_clone_is_a_fork_into_new_namespaces(user_namespaces):
    (facts,) = run_child(
        "import random; random.seed(1); expected = random.Random(1).random()\n"
        "stop = threading.Event(); threading.Thread(target=stop.wait).start()\n"
        "os.register_at_fork(after_in_child=lambda: handlers.append('child'),\n"
        "    before=lambda: handlers.append('before'))\n"
        "handlers = []; old = os.readlink('/proc/self/ns/user')\n"
        "reading, writing = os.pipe()\n"
        "pid = syscalls.clone(syscalls.INTERPRETER_NAMESPACES | syscalls.CLONE_NEWNET)\n"
        "if pid == 0:\n"
        "    syscalls.map_own_ids(); syscalls.bring_up_loopback()\n"
        "    inner = os.fork() or os._exit(7)\n"
        "    mine = dict(pid=os.getpid(), tid=threading.get_native_id(), inner=inner,\n"
        "        code=ended(inner), threads=threading.active_count(), handlers=handlers,\n"
        "        ids=[os.getuid(), os.getgid()], reseeded=random.random() != expected)\n"
        "    os.write(writing, json.dumps(mine).encode()); os._exit(3)\n"
        "new = os.readlink(f'/proc/{pid}/ns/user'); stop.set()\n"
        "say(code=ended(pid), child=json.loads(os.read(reading, 4096)), apart=new != old)"
    )
    assert facts["apart"]
    assert facts["code"] == 3
    assert facts["child"] == {
        "pid": 1,
        "tid": 1,
        "inner": 2,
        "code": 7,
        "threads": 1,
        "handlers": ["before", "child", "before"],
        "ids": [os.getuid(), os.getgid()],
        "reseeded": True,
    }


@pytest.mark.parametrize(
    "work",
    [
        pytest.param("pass", id="compute"),
        pytest.param("threading.Thread(target=int).start()", id="start threads"),
    ],
)
def test_clone_works_while_threads_want_the_interpreter(user_namespaces, work):
    """They ask for its lock just when the child, which has no threads, begins.

    A thread that starts another one also asks for a lock that Python 3.13 holds during a fork.
    """
    (facts,) = run_child(
        f"def spin():\n    while True: {work}\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n"
        "sys.setswitchinterval(1e-5); codes = []\n"
        "for _ in range(20):\n"
        "    pid = syscalls.clone(syscalls.INTERPRETER_NAMESPACES)\n"
        "    if pid == 0:\n"
        "        signal.alarm(60); sum(range(10_000)); os._exit(threading.active_count())\n"
        "    codes.append(ended(pid))\n"
        "say(codes=codes); os._exit(0)"
    )
    assert facts["codes"] == [1] * 20


def test_a_process_ends_with_its_parent():
    (facts,) = run_child(
        "reading, writing = os.pipe(); pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.close(1); os.close(2); syscalls.die_with_parent(); os.write(writing, b'.')\n"
        "    time.sleep(60)\n"
        "os.read(reading, 1); say(pid=pid)"
    )
    deadline = time.monotonic() + 300
    while processes.process_state(facts["pid"]) not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_huge_pages_hold_what_was_there_in_a_fork_too():
    code = (
        "import os\n"
        "from mega_agentrl.sandbox.guest import syscalls\n"
        "data = [bytes([n % 251]) * 1000 for n in range(20_000)]\n"
        "def right(): return all(one == bytes([n % 251]) * 1000 for n, one in enumerate(data))\n"
        "print(syscalls.collapse_to_huge_pages() >= 0, right())\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    data[5] = b'x'\n"
        "    os._exit(0 if data[4] == bytes([4]) * 1000 else 1)\n"
        "print(os.waitpid(pid, 0)[1], right())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["True", "True", "0", "True"], run.stderr

"""System calls by hand: layouts against the kernel's own numbers, the rest in child processes."""

import errno
import json
import os
import platform
import struct
import subprocess
import sys
import time

import pytest

from mega_agentrl.sandbox.guest import processes, syscalls

UNAME = {"x86_64": 63, "aarch64": 160}[platform.machine()]
ALLOW, ERRNO, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000

BEGIN = (
    "import errno, fcntl, json, os, signal, sys, threading, time\n"
    "from mega_agentrl.sandbox.guest import syscalls\n"
    "def say(**facts): print(json.dumps(facts), flush=True)\n"
    "def ended(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    "def tried(call, *arguments):\n"
    "    try: call(*arguments); return 0\n"
    "    except OSError as error: return error.errno\n"
)


def program(action):
    """A filter that answers `action` to uname and lets all else pass."""
    load = struct.pack("HBBI", 0x20, 0, 0, 0)
    skip = struct.pack("HBBI", 0x15, 0, 1, UNAME)
    return load + skip + b"".join(struct.pack("HBBI", 0x06, 0, 0, one) for one in (action, ALLOW))


def run_child(code):
    """The output of `code` in a child process, one JSON object a line."""
    command = [sys.executable, "-B", "-c", BEGIN + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
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
        timeout=30,
    )
    if done.returncode:
        pytest.skip(f"user namespaces are not to be had here: {done.stderr.strip()[-200:]}")


def test_layouts_are_the_kernels():
    assert syscalls.SECCOMP_NOTIF_RECV == 0xC0502100
    assert syscalls.SECCOMP_NOTIF_SEND == 0xC0182101
    assert syscalls.clone_flags_register(syscalls.CLONE_NEWUSER) == 0x11200011


def test_notification_and_answer():
    notification = struct.pack(
        "=QIIiIQ6Q", 7 << 40, 123, 0, 56, 0xC000003E, 9, 0x7E020011, *[1] * 5
    )
    assert len(notification) == syscalls.NOTIFICATION_BYTES == 80
    assert syscalls.unpack_notification(notification) == (7 << 40, 123, 56, 0x7E020011)
    refused, let_go = (syscalls.pack_response(7 << 40, error=error) for error in (errno.EPERM, 0))
    assert bytes(refused) == struct.pack("=QqiI", 7 << 40, 0, -errno.EPERM, 0)
    assert bytes(let_go) == struct.pack("=QqiI", 7 << 40, 0, 0, 1)


def test_failures_name_the_call():
    with pytest.raises(OSError, match="mount nofs on /nowhere: ") as failed:
        syscalls.mount("nofs", "/nowhere", 0)
    assert failed.value.errno in (errno.ENOENT, errno.EPERM)
    with pytest.raises(OSError, match="setns: Bad file descriptor"):
        syscalls.setns(-1, 0)
    with pytest.raises(OSError, match="clone into new namespaces: Invalid argument"):
        syscalls.clone(0x00010000)  # a thread, but not of our memory
    assert syscalls.check_status(5, "nothing") == 5


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


def test_clone_while_threads_want_the_interpreter(user_namespaces):
    """They ask for its lock just when the child, which has no threads, begins."""
    (facts,) = run_child(
        "def spin():\n    while True: pass\n"
        "for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n"
        "sys.setswitchinterval(1e-5); codes = []\n"
        "for _ in range(20):\n"
        "    pid = syscalls.clone(syscalls.INTERPRETER_NAMESPACES)\n"
        "    if pid == 0: signal.alarm(5); sum(range(10_000)); os._exit(threading.active_count())\n"
        "    codes.append(ended(pid))\n"
        "say(codes=codes); os._exit(0)"
    )
    assert facts["codes"] == [1] * 20


def test_capabilities_are_gone_for_good(user_namespaces):
    (facts,) = run_child(
        "reading, writing = os.pipe(); pid = syscalls.clone(syscalls.INTERPRETER_NAMESPACES)\n"
        "def powers():\n"
        "    fields = dict(line.split(':\\t') for line in open('/proc/self/status'))\n"
        "    names = ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb')\n"
        "    return [int(fields['Cap' + name], 16) for name in names]\n"
        "if pid == 0:\n"
        "    syscalls.map_own_ids(); before = powers()\n"
        "    first = tried(syscalls.mount, 'tmpfs', '/tmp', 0, 'size=1m')\n"
        "    syscalls.drop_capabilities(); second = tried(syscalls.mount, 'tmpfs', '/tmp', 0)\n"
        "    mine = dict(before=before[2], first=first, after=powers(), second=second)\n"
        "    os.write(writing, json.dumps(mine).encode()); os._exit(0)\n"
        "ended(pid); say(**json.loads(os.read(reading, 4096)))"
    )
    assert facts["before"] > 0
    assert facts["first"] == 0
    assert facts["after"] == [0] * 5
    assert facts["second"] == errno.EPERM


def test_a_filter_answers_and_is_inherited():
    code = f"syscalls.install_seccomp_filter({program(ERRNO | 77)!r}, listener=False)\n"
    (facts,) = run_child(
        "before = tried(os.uname)\n" + code + "pid = os.fork()\n"
        "if pid == 0: os._exit(tried(os.uname))\n"
        "say(before=before, own=tried(os.uname), child=ended(pid))"
    )
    assert facts == {"before": 0, "own": 77, "child": 77}


def test_a_listener_is_asked_and_answers():
    code = f"fd = syscalls.install_seccomp_filter({program(NOTIFY)!r}, listener=True)\n"
    (facts,) = run_child(
        code + "pid = os.fork()\n"
        "if pid == 0: os._exit(tried(os.uname) * 10 + tried(os.uname))\n"
        "asked = []\n"
        "for error in (7, 0):\n"
        "    buffer = bytearray(syscalls.NOTIFICATION_BYTES)\n"
        "    fcntl.ioctl(fd, syscalls.SECCOMP_NOTIF_RECV, buffer)\n"
        "    cookie, who, number, _ = syscalls.unpack_notification(buffer)\n"
        "    asked.append([who == pid, number])\n"
        "    response = syscalls.pack_response(cookie, error=error)\n"
        "    fcntl.ioctl(fd, syscalls.SECCOMP_NOTIF_SEND, response)\n"
        "say(asked=asked, code=ended(pid), fd=fd)"
    )
    assert facts["fd"] > 2
    assert facts["asked"] == [[True, UNAME]] * 2
    assert facts["code"] == 70  # refused with 7, then let through


@pytest.mark.parametrize("text", [b"", b"\xff" * 8])
def test_no_program_is_no_filter(text):
    (facts,) = run_child(
        f"say(errno=tried(lambda: syscalls.install_seccomp_filter({text!r}, listener=False)))"
    )
    assert facts["errno"] == errno.EINVAL


def test_ends_with_its_parent():
    (facts,) = run_child(
        "reading, writing = os.pipe(); pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.close(1); os.close(2); syscalls.die_with_parent(); os.write(writing, b'.')\n"
        "    time.sleep(60)\n"
        "os.read(reading, 1); say(pid=pid)"
    )
    deadline = time.monotonic() + 60
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
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["True", "True", "0", "True"], run.stderr

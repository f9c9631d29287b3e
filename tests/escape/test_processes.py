"""Nothing inside reaches a process of the host, and none of its own outlives its call."""

import os
import subprocess
import sys
import time

import pytest

from tests.escape.outside import (
    end_all,
    every_target,
    outside,
    pids_named,
    vanish,
    with_values,
)
from tests.sandbox.sandboxes import wait_until_running

KILL = """
import os, signal
sent = 0
for pid in pids:
    for number in (signal.SIGKILL, signal.SIGTERM):
        try:
            os.kill(pid, number)
            sent += pid != os.getpid()
        except OSError:
            pass
print('sent', sent)
"""

KILL_ALL = """
import os
if os.readlink('/proc/self/ns/pid') == host:
    print('in the PID namespace of the host')
else:
    try:
        os.kill(-1, 9)
    except OSError:
        pass
    print('done')
"""

TRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
def call(status):
    return 'done' if status == 0 else os.strerror(ctypes.get_errno())
print('attach', call(libc.ptrace(0x4206, pid, None, None)))
class Part(ctypes.Structure):
    _fields_ = [('start', ctypes.c_void_p), ('size', ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
ours, theirs = Part(ctypes.addressof(buffer), 8), Part(address, 8)
libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
print('read', buffer.raw)
try:
    with open(f'/proc/{pid}/mem', 'rb') as file:
        file.seek(address)
        print('file', file.read(8))
except OSError as error:
    print('file', type(error).__name__)
"""

VICTIM = """
import ctypes, time
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
buffer = ctypes.create_string_buffer(b'secret-1', 8)
print(ctypes.addressof(buffer), flush=True)
time.sleep(60)
"""

LEAVE = """
import os, signal, time
def leave(*, own_session, ignore):
    if os.fork():
        os.wait()
        return
    if own_session:
        os.setsid()
    if os.fork():
        os._exit(0)
    for number in (1, 2, 13, 15) if ignore else ():
        signal.signal(number, signal.SIG_IGN)
    open('/proc/self/comm', 'w').write(name)
    if close:
        os.closerange(0, 64)
    time.sleep(600)
    os._exit(0)
leave(own_session=True, ignore=True)
leave(own_session=False, ignore=False)
if os.fork() == 0:
    os.execv('/bin/sh', ['sh', '-c', f'printf {name} > /proc/self/comm; while :; do read x; done'])
time.sleep(0.2)
print('left')
"""


@pytest.fixture
def victim(tmp_path):
    """A process of the host, and the address of its secret."""
    with subprocess.Popen([sys.executable, "-c", VICTIM], stdout=subprocess.PIPE) as child:
        yield child, int(child.stdout.readline())
        child.kill()


async def test_no_process_of_the_host_is_killed(target, victim, tmp_path):
    child, _ = victim
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        assert outside(with_values(KILL, pids=[other.pid]), tmp_path) == "sent 2"
        assert other.wait(300) == -9
    near = [*range(max(2, child.pid - 200), child.pid + 200)]
    pids = [child.pid, os.getpid(), os.getppid(), -child.pid, *near]
    result = await target.attack(with_values(KILL, pids=pids))
    assert result.output in ("sent 0", "")  # "" where one of the pids was its own
    assert child.poll() is None


async def test_killing_every_process_ends_none_of_the_host(target, victim):
    child, _ = victim
    code = with_values(KILL_ALL, host=os.readlink("/proc/self/ns/pid"))
    result = await target.attack(code)
    assert result.output in ("done", "") or "signal" in result.output
    assert child.poll() is None


async def test_no_process_of_the_host_is_traced_or_read(target, victim, tmp_path):
    child, address = victim
    code = with_values(TRACE, pid=child.pid, address=address)
    free = outside(code, tmp_path).splitlines()
    assert free == ["attach done", "read b'secret-1'", "file b'secret-1'"]
    held = (await target.attack(code)).output.splitlines()
    assert held[0] in ("attach Operation not permitted", "attach No such process")
    assert held[1] == "read " + repr(bytes(8))
    assert held[2] in ("file FileNotFoundError", "file PermissionError")


@every_target
@pytest.mark.parametrize(
    "close", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["holds", "closes"]
)
async def test_processes_left_behind_end(target, tmp_path, marker, close):
    code = with_values(LEAVE, name=marker, close=close)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path
    ) as child:
        try:
            assert child.stdout.readline() == b"left\n"
            child.wait(300)
            wait_until_running(marker, 3)
        finally:  # what is left would take a core until the machine stops
            num_left = end_all(marker)
        assert num_left == 3
    result = await target.attack(code)
    assert result.output == "left"  # it does not wait for them: each sleeps for ten minutes
    if target.keeps_processes:
        await target.start_again()
    assert vanish(marker)


async def test_a_thread_left_behind_does_not_run_on(target, marker):
    code = (
        "import threading\ndef spin():\n    while True: pass\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        f"open('/proc/self/comm', 'w').write({marker!r})\nprint('left')"
    )
    assert (await target.attack(code)).output == "left"
    if target.keeps_interpreter:  # it stays, but stopped: what it left runs only while a call runs
        before = cpu_ticks(pids_named(marker))
        assert before
        time.sleep(0.1)
        assert cpu_ticks(pids_named(marker)) == before
        await target.start_again()
    assert vanish(marker)


def cpu_ticks(pids):
    ticks = {}
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(") ")[2].split()
        ticks[pid] = (int(fields[11]) + int(fields[12]), fields[0])
    return ticks

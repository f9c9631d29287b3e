"""What the kernel counts per user: a session that takes all it can get leaves others enough.

Descriptors in flight and inotify instances are refused altogether (`test_neighbours`,
`test_syscalls`), and processes are counted per namespace (`test_process_limit`).
"""

import asyncio
import json

import pytest

from mega_agentrl.sandbox.uid_lease import UID_RANGE, needs_dedicated_uid
from tests.escape.outside import outside, pids_named, with_values
from tests.escape.test_neighbours import neighbour, runner_of
from tests.sandbox.sandboxes import wait_until_running

TAKE = """
import ctypes, fcntl, json, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.shmat.restype = ctypes.c_void_p
def pipe(number):
    _, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
def small_pipe(number):
    os.pipe()
def terminal(number):
    os.openpty()
def signal_to_itself(number):
    signal.pthread_sigmask(signal.SIG_BLOCK, [34])
    if libc.sigqueue(os.getpid(), 34, None):
        raise OSError
def queue(number):
    path = b'/escape%d-%d' % (os.getpid(), number)
    if libc.mq_open(path, 0o102, 0o600, None) < 0:
        raise OSError
    libc.mq_unlink(path)  # it lives as long as its descriptor
def locked(number):
    segment = libc.shmget(0, 1 << 16, 0o1600)
    libc.shmat(segment, None, 0)
    status = libc.shmctl(segment, 11, None)
    libc.shmctl(segment, 0, None)  # it lives as long as it is attached
    if status:
        raise OSError
def mapped(number):
    address = libc.mmap(None, ctypes.c_size_t(1 << 16), 3, 0x2022, -1, 0)  # MAP_LOCKED
    if address in (None, 2**64 - 1):
        raise OSError
def key(number):
    number_of_call = {'x86_64': 248, 'aarch64': 217}[os.uname().machine]
    name = b'key%d' % number
    if libc.syscall(number_of_call, b'user', name, b'x', ctypes.c_long(1), ctypes.c_long(-2)) < 0:
        raise OSError
def take(kind, answer):
    own_name = open('/proc/self/comm', 'w')  # later there may be no descriptor left
    number = 0
    try:
        while number < 400:
            globals()[kind](number)
            number += 1
    except OSError:
        pass
    own_name.write(name)
    own_name.close()
    os.write(answer, b'%d' % number)
    time.sleep(hold_s)
    os._exit(0)
counts = {}
for kind in kinds:  # in a child each, which has its own descriptors
    reading, writing = os.pipe()
    if os.fork() == 0:
        take(kind, writing)
    os.close(writing)
    counts[kind] = int(os.read(reading, 10))
    os.close(reading)
print(json.dumps(counts), flush=True)
time.sleep(hold_s)
"""

MOST = {
    "pipe": 255,  # those that fit below the limit of open files
    "small_pipe": 255,
    "terminal": 64,
    "signal_to_itself": 256,
    "queue": 0,
    "locked": 0,
    "mapped": 0,
    "key": 0,
}
"""How many of each a session may take."""

USE = """
import ctypes, os, signal, subprocess, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [34])
sent = [ctypes.CDLL(None).sigqueue(os.getpid(), 34, None) for _ in range(100)]
terminal = os.openpty()
links = [os.pipe() for _ in range(40)]
for reading, writing in links:
    os.write(writing, b'12345678')
texts = [os.read(reading, 8) for reading, _ in links]
for fd in sum(links, ()):
    os.close(fd)
output = subprocess.run(['/usr/bin/head', '-c', '300000', '/dev/zero'], stdout=-1).stdout
thread = threading.Thread(target=texts.clear)
thread.start()
thread.join()
print(sum(sent), len(texts), len(output))
"""


async def test_a_session_that_takes_all_leaves_its_neighbour_enough(target, marker, tmp_path):
    replaced = target.pool.num_replaced
    take_all = with_values(TAKE, kinds=[*MOST], name=marker, hold_s=0)
    free = json.loads(outside(take_all, tmp_path))
    assert all(free[kind] > MOST[kind] for kind in MOST), free
    other = await runner_of(target)
    code = with_values(TAKE, kinds=[*MOST], name=marker, hold_s=600)
    attack = asyncio.create_task(target.attack(code, 600.0))
    await asyncio.to_thread(wait_until_running, marker, len(MOST))
    fresh = await runner_of(target) if target.session else other
    for runner in (fresh, other):
        assert (await runner.run(USE)).output == "0 0 300000"
    await neighbour(target, fresh)
    assert not attack.done()
    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)
    taken = await (target.session or target.pool).run(take_all)
    counts = json.loads(taken.output.splitlines()[-1])
    for kind, most in MOST.items():
        # A workspace may open four times as many files, as build tools do.
        factor = 4 if kind.endswith("pipe") and target.keeps_processes else 1
        assert counts[kind] <= factor * most, kind
    if target.session:
        for runner in (fresh, other):
            await runner.close()
    assert target.pool.num_replaced == replaced


async def test_every_sandbox_has_a_user_of_its_own(target, marker):
    if not needs_dedicated_uid():
        pytest.skip("a launcher that is not root: all sandboxes have its user")
    wait = f"import time\nopen('/proc/self/comm', 'w').write({marker!r})\ntime.sleep(60)"
    runners = [await target.pool.open() for _ in range(2)] if target.session else [target.pool] * 2
    calls = [asyncio.create_task(runner.run(wait)) for runner in runners]
    await asyncio.to_thread(wait_until_running, marker, 2)
    users = set()
    for pid in pids_named(marker):
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            (line,) = (line for line in file if line.startswith("Uid:"))
        users |= {int(word) for word in line.split()[1:]}
    assert len(users) == 2
    assert users <= {*UID_RANGE}
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    if target.session:
        for runner in runners:
            await runner.close()

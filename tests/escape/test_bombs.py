"""Code that exhausts a resource is stopped at a limit or deadline and affects no one else."""

import asyncio
import os
import resource
import signal
import sys
import time

import pytest

from tests.escape.outside import (
    end_all,
    every_target,
    outside,
    started,
    vanish,
    with_values,
)
from tests.processes import descendants
from tests.sandbox.sandboxes import wait_until_running

CHILDREN = """
import os, time
open('/proc/self/comm', 'w').write(name)
made = 0
try:
    while made < bound:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError as error:
    print(error.strerror)
print('made', made, flush=True)
if hold:
    time.sleep(60)
"""

FORK_BOMB = """
import os, time
open('/proc/self/comm', 'w').write(name)
for _ in range(bound):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(60)
"""

THREADS = """
import threading, time
made = 0
try:
    while made < bound:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        made += 1
except RuntimeError as error:
    print(error)
print('made', made)
"""

MEMORY = """
block = bytearray(mib << 20)
for i in range(0, len(block), 4096):
    block[i] = 1
print(len(block) >> 20)
"""

MEMORY_TOGETHER = """
import os, signal, time
reader, writer = os.pipe()
children = []
for index in range(processes):
    children.append(os.fork())
    if children[-1] == 0:
        block = bytearray(mib << 20)
        for i in range(0, len(block), 4096):
            block[i] = 1
        os.write(writer, bytes([index]))
        time.sleep(60)
os.close(writer)
os.set_blocking(reader, False)
full = set()
deadline = time.monotonic() + wait_s
alive = children
# Until all have filled theirs, or the limit has ended one.
while len(full) < processes == len(alive) and time.monotonic() < deadline:
    try:
        full.update(os.read(reader, processes))
    except BlockingIOError:
        time.sleep(0.01)
    alive = [pid for pid in alive if os.waitpid(pid, os.WNOHANG) == (0, 0)]
print(sum(children[index] in alive for index in full))
for pid in alive:
    os.kill(pid, signal.SIGKILL)
"""

OUTPUT = """
import os
block = b'x' * (1 << 20)
for _ in range(10 << 10):
    os.write(fd, block)
"""

STUBBORN = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
print('ready', flush=True)
while True:
    try:
        time.sleep(0.01)
    except BaseException:
        pass
"""


async def most_processes(run):
    """Return the result of `run`, and the most descendants of ours at a time meanwhile."""
    task = asyncio.ensure_future(run)
    most = 0
    while not task.done():
        most = max(most, len(descendants(os.getpid())))
        await asyncio.sleep(0.02)
    return task.result(), most


async def test_children_beyond_the_limit_are_refused_and_all_end(target, tmp_path, marker):
    bounded = with_values(CHILDREN, name=marker, bound=200, hold=True)
    with started(bounded, tmp_path) as child:
        assert child.stdout.readline() == "made 200\n"
        assert end_all(marker) == 201
    code = with_values(CHILDREN, name=marker, bound=200, hold=False)
    before = len(descendants(os.getpid()))
    result, most = await most_processes(target.attack(code))
    assert "made 200" not in result.output
    assert most < before + 200
    if target.keeps_processes:
        await target.start_again()
    # An interpreter that is still there goes by the name that it gave itself.
    assert vanish(marker, num_left=1 if target.keeps_interpreter else 0)


@every_target
async def test_a_fork_bomb_is_bounded_and_ends(target, tmp_path, marker):
    bounded = with_values(FORK_BOMB, name=marker, bound=6)
    with started(bounded, tmp_path):
        await asyncio.to_thread(wait_until_running, marker, 2**6)
        assert end_all(marker) == 2**6
    assert vanish(marker)
    code = with_values(FORK_BOMB, name=marker, bound=10**9)
    before = len(descendants(os.getpid()))
    result, most = await most_processes(target.attack(code, 0.5))
    assert result.status.value in ("timeout", "user_error")
    assert most < before + 200
    assert vanish(marker)


async def test_threads_beyond_the_limit_are_refused(target, tmp_path):
    code = with_values(THREADS, bound=400)
    assert outside(code, tmp_path) == "made 400"
    assert "made 400" not in (await target.attack(code)).output


@every_target
async def test_the_memory_of_one_process_is_bounded(target, tmp_path):
    code = with_values(MEMORY, mib=300)
    assert outside(code, tmp_path) == "300"
    result = await target.attack(code)
    assert result.status.value == "user_error"
    assert result.output.endswith("MemoryError") or "signal 9" in result.output


def can_limit_memory():
    """Whether the memory of several processes can be limited together here."""
    return os.access("/sys/fs/cgroup/memory", os.W_OK) or (
        "memory" in _controllers() and os.access("/sys/fs/cgroup", os.W_OK)
    )


def _controllers():
    try:
        with open("/sys/fs/cgroup/cgroup.controllers", encoding="ascii") as file:
            return file.read().split()
    except FileNotFoundError:
        return []


async def test_the_memory_of_several_processes_is_bounded_together(target, tmp_path):
    if not can_limit_memory():
        pytest.skip("a machine whose cgroups we may not use: the limits are per process")
    code = with_values(MEMORY_TOGETHER, processes=12, mib=60, wait_s=60)
    assert outside(code, tmp_path) == "12"
    result = await target.attack(code, 60.0)
    assert result.output != "12"
    assert not result.output.isdigit() or int(result.output) * 60 <= 600


@pytest.mark.parametrize("fd", [1, pytest.param(2, marks=pytest.mark.extended)])
async def test_output_without_end_is_bounded(target, tmp_path, fd):
    code = with_values(OUTPUT, fd=fd)
    with started(code, tmp_path) as child:
        seen = 0
        while seen < 64 << 20:
            part = child.stdout.buffer.read1(1 << 20)
            assert part
            seen += len(part)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await target.attack(code, 0.5)
    assert result.status.value in ("ok", "timeout")
    assert len(result.output) < 9000
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


async def test_a_loop_that_ignores_signals_ends_at_the_deadline(target, tmp_path):
    with started(STUBBORN, tmp_path) as child:
        assert child.stdout.readline() == "ready\n"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(child.pid, number)
        time.sleep(0.1)
        assert child.poll() is None
    result = await target.attack(STUBBORN, 0.5)
    assert result.status.value == "timeout"


async def test_a_loop_that_gives_nothing_back_ends_at_the_deadline(target):
    code = "import os\nos.close(1); os.close(2)\nwhile True: pass"
    assert (await target.attack(code, 0.5)).status.value == "timeout"
    held = "import time\nprint('x', flush=True)\n"
    held += "(lambda f: f(f))(lambda f: (time.sleep(0.001), f(f)))"
    assert (await target.attack(held, 0.5)).status.value in ("timeout", "user_error")


async def test_a_bomb_leaves_its_neighbour_alone(target, marker):
    bomb = with_values(FORK_BOMB, name=marker, bound=10**9)
    busy = "import subprocess, sys\nprint(subprocess.check_output(['/bin/echo', 'fine']).decode())"

    async def neighbour():
        session = await target.pool.open() if target.session else None
        outputs = []
        for _ in range(3):
            result = await (session or target.pool).run(busy)
            outputs.append(result.output)
        if session:
            await session.close()
        return outputs

    attack = asyncio.create_task(target.attack(bomb, 600.0))
    await asyncio.to_thread(wait_until_running, marker, 2)
    assert await neighbour() == ["fine"] * 3
    assert not attack.done()
    attack.cancel()
    await asyncio.gather(attack, return_exceptions=True)
    assert vanish(marker)

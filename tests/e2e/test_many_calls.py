"""Thousands of calls, some of which hang or crash: every outcome is right, nothing is left."""

import asyncio
import gc
import os
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.sandbox import cgroup
from mega_agentrl.sandbox.pool import SandboxPool
from tests.processes import descendants

pytestmark = pytest.mark.extended

WORKERS = 8
HUNG_S = 0.5
CALL_S = 120.0

HANGS = (
    "while True: pass",
    "import time; time.sleep(600)",
    "import os, time\nif os.fork() == 0: time.sleep(600)\ntime.sleep(600)",
    "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nsignal.pause()",
    "import os\nos.close(1); os.close(2)\nwhile True: os.getpid()",
)
CRASHES = (
    ("raise ValueError('boom {n}')", "ValueError: boom {n}"),
    ("import os; os._exit(7)", ""),
    ("import ctypes; ctypes.string_at(0)", "Killed by signal 11"),
    ("x = bytearray(1 << 33)", "MemoryError"),
    ("import sys; sys.exit('bye {n}')", "bye {n}"),
    ("def f(:", "SyntaxError: invalid syntax"),
    ("import os; os.abort()", "Killed by signal"),
    ("import os, time\nif os.fork() == 0: time.sleep(600)\n1 / 0", "ZeroDivisionError"),
)
WORKS = (
    "print({n} * {n})",
    "open('a', 'w').write('{n}'); print(int(open('a').read()) * {n})",
    "import subprocess\nprint(subprocess.check_output(['/bin/echo', str({n} * {n})]).decode())",
    "import os, time\nif os.fork() == 0: time.sleep(600)\nprint({n} * {n})",
)


def make_call(n):
    """Code, deadline, status and a part of the answer of call `n`: 5 % hang, 5 % crash."""
    kind = n % 20
    if kind == 7:
        return HANGS[n // 20 % len(HANGS)], HUNG_S, "timeout", f"Timed out after {HUNG_S} s."
    if kind == 13:
        code, said = CRASHES[n // 20 % len(CRASHES)]
        return code.replace("{n}", str(n)), CALL_S, "user_error", said.replace("{n}", str(n))
    # Most calls are the plain one: starting processes is what takes the time.
    code = WORKS[n % 4] if n % 10 == 0 else WORKS[n % 2]
    return code.replace("{n}", str(n)), CALL_S, "ok", str(n * n)


NUM_KINDS = 20 * len(CRASHES)
"""Number of calls from which on there is each hang, crash and answer."""
NAMES = ("descriptors of this process", "processes below it", "descriptors of those")


def holdings():
    """How much of each of NAMES there is."""
    below = set(descendants(os.getpid()))
    return count_descriptors("self"), len(below), sum(map(count_descriptors, below))


def count_descriptors(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def own_cgroups():
    """Control groups that were made for this process."""
    return {str(path) for path in Path("/sys/fs/cgroup").rglob(f"mega_agentrl-*-{os.getpid()}-*-*")}


async def cgroups_left(before):
    """Control groups that were not there before. They are removed as the next session does it,
    until all are gone or for a minute: on a busy machine the kernel ends killed processes late.
    """
    deadline = time.monotonic() + 300
    while left := own_cgroups() - before:
        if time.monotonic() > deadline:
            break
        cgroup.remove_pending()
        await asyncio.sleep(0.05)
    return left


async def grown(before):
    """What is held in excess of `before` when the kernel has collected what was killed, or after
    half a minute; other tests' leftovers may vanish meanwhile.
    """
    deadline = time.monotonic() + 300
    while excess := [
        f"{name}: {now}, were {was}"
        for name, now, was in zip(NAMES, holdings(), before, strict=True)
        if now > was
    ]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    return excess


async def at_rest():
    """What is held when nothing has changed for a second; looks for ten at most."""
    gc.collect()
    seen = []
    while len(seen) < 40 and (len(seen) < 4 or seen[-4:] != seen[-1:] * 4):
        await asyncio.sleep(0.25)
        seen.append(holdings())
    return seen[-1]


async def call_all(pool, count):
    """Wrong outcomes of `count` calls, one worker's worth of calls at a time."""
    numbers = iter(range(count))
    wrong = []

    async def caller():
        for n in numbers:
            code, timeout_s, status, part = make_call(n)
            result = await pool.run(code, timeout_s)
            if result.status.value != status or part not in result.output:
                wrong.append((n, code, result))

    await asyncio.gather(*(caller() for _ in range(WORKERS)))
    return wrong


@asynccontextmanager
async def started_pool(tmp_path, monkeypatch, **settings):
    """A pool of which nothing may be left once it is closed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before_start, groups_before = await at_rest(), own_cgroups()
    pool = SandboxPool(PythonToolConfig(preload_modules=[], memory_limit_mib=128, **settings))
    await pool.start()
    yield pool
    await pool.close()
    gc.collect()
    assert not await grown(before_start)
    assert not list(tmp_path.rglob("*"))
    assert not await cgroups_left(groups_before)


@pytest.mark.parametrize("count", [NUM_KINDS, pytest.param(10_000, marks=pytest.mark.slow(60))])
async def test_many_calls_are_answered_rightly_and_leave_nothing_behind(
    count, tmp_path, monkeypatch
):
    async with started_pool(tmp_path, monkeypatch, num_workers=WORKERS) as pool:
        assert not await call_all(pool, 40)
        warm = await at_rest()
        folders, groups = sorted(tmp_path.rglob("*")), own_cgroups()
        wrong = await call_all(pool, count)
        assert not wrong, f"{len(wrong)} wrong: {wrong[:5]}"
        assert not await grown(warm)
        assert sorted(tmp_path.rglob("*")) == folders
        assert not await cgroups_left(groups)
        assert pool.num_replaced == 0


async def test_many_sessions_leave_nothing_behind(tmp_path, monkeypatch):
    settings = {"num_workers": 2, "mode": PythonMode.stateful, "timeout_s": CALL_S}
    async with started_pool(tmp_path, monkeypatch, **settings) as pool:
        await trajectories(pool, 4)
        warm, groups = await at_rest(), own_cgroups()
        await trajectories(pool, 20)
        assert not await grown(warm)
        assert not await cgroups_left(groups)


async def trajectories(pool, count):
    """Sessions of some calls and a branch; one of ten hangs, one of ten crashes, some are
    closed while their parent lives and some after it."""

    async def one(n):
        root = await pool.open()
        assert (await root.run(f"x = [{n}]; print(x)")).output == f"[{n}]"
        child = await root.fork()
        assert (await child.run("x.append(1); print(x)")).output == f"[{n}, 1]"
        grandchild = await child.fork()
        if n % 10 == 3:
            assert (await child.run("while True: pass", HUNG_S)).status.value == "timeout"
        if n % 10 == 7:
            assert (await child.run("import os; os._exit(3)")).status.value == "user_error"
        assert (await root.run("print(x)")).output == f"[{n}]"
        assert (await grandchild.run("print(x)")).output == f"[{n}, 1]"
        family = [root, child, grandchild]
        for session in family if n % 2 else reversed(family):
            await session.close()

    gate = asyncio.Semaphore(4)

    async def limited(n):
        async with gate:
            await one(n)

    await asyncio.gather(*map(limited, range(count)))

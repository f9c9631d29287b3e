"""The pool from outside: what its calls answer, its limits, and what happens when it breaks.

What code in a sandbox cannot do is tested in `tests/escape`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mega_agentrl.config.enums import PythonMode, SandboxIsolation
from mega_agentrl.errors import InputError
from mega_agentrl.sandbox import cgroup, client
from mega_agentrl.sandbox import pool as pool_module
from mega_agentrl.types.records import ToolStatus
from tests.processes import descendants, wait_until_gone
from tests.sandbox.sandboxes import named, running_pool, shared_pool, start_pool, wait_until_running


@pytest.fixture(scope="module")
def pool():
    yield from shared_pool(num_workers=2)


async def is_healthy(pool):
    results = await asyncio.gather(*(pool.run(f"print({i})") for i in range(4)))
    return [result.output for result in results] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("import sys; print('a'); print('b', file=sys.stderr)", ToolStatus.ok, "a"),
        ("print('é\\u4e2d')", ToolStatus.ok, "é中"),
        (
            "print('a')\nraise ValueError('boom')",
            ToolStatus.user_error,
            'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\n'
            "ValueError: boom",
        ),
        ("import sys; print('a'); sys.exit(3)", ToolStatus.user_error, ""),
        ("raise SystemExit('bye')", ToolStatus.user_error, "bye"),
    ],
    ids=["output", "letters", "error", "exit code", "exit text"],
)
async def test_each_end_of_a_call_has_its_status_and_output(pool, code, status, output):
    result = await pool.run(code)
    assert (result.status, result.output) == (status, output)


async def test_a_crash_names_its_signal(pool):
    crashed = await pool.run("import ctypes; ctypes.string_at(0)")
    assert crashed.output.startswith("Killed by signal 11")


async def test_cancelling_ends_the_call_at_once(pool):
    code, name = named("while True: pass")
    running = [asyncio.create_task(pool.run(code, 600)) for _ in range(4)]
    await asyncio.to_thread(wait_until_running, name, 2)
    for call in running:  # two run, two wait for a sandbox
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(call.cancelled() for call in running)
    assert await is_healthy(pool)


@pytest.mark.extended
async def test_cpu_time_is_limited():
    async with running_pool(timeout_s=0.3) as pool:
        result = await pool.run("while True: pass", 60.0)
    assert result.status is ToolStatus.timeout
    assert "CPU time" in result.output


async def test_a_pool_without_isolation_warns_and_works(caplog, tmp_path):
    target = tmp_path / "written"
    async with running_pool(isolation=SandboxIsolation.none) as pool:
        await pool.run(f"open({str(target)!r}, 'w').close()")
        late = await pool.run("while True: pass", 0.3)
    assert target.exists()
    assert late.status is ToolStatus.timeout
    assert caplog.text.count("WITHOUT ANY ISOLATION") == 1


async def test_sessions_without_isolation_keep_and_fork_their_state():
    async with running_pool(mode=PythonMode.stateful, isolation=SandboxIsolation.none) as pool:
        session = await pool.open()
        await session.run("x = [1]; open('f', 'w').write('a')")
        child = await session.fork()
        await child.run("x.append(2); open('f', 'a').write('b')")
        look = "print(x, open('f').read())"
        assert (await child.run(look)).output == "[1, 2] ab"
        assert (await session.run(look)).output == "[1] a"
        everyone = [pid for box in pool._sandboxes for pid in descendants(box.pid)]
        assert len(everyone) >= 4  # the spare one, one that is retired, two that live
    assert not wait_until_gone(everyone)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import os, time\nif os.fork(): time.sleep(60)\nos.setsid(); time.sleep(60)",
    ],
    ids=["loop", "fork"],
)
async def test_a_call_ends_at_its_deadline(pool, code):
    result = await pool.run(code, 0.25)
    assert result.status is ToolStatus.timeout
    assert result.output == "Timed out after 0.25 s."
    assert await is_healthy(pool)


async def test_long_output_is_cut_with_a_note(monkeypatch):
    monkeypatch.setattr(client, "MAX_OUTPUT_CHARS", 100)
    async with running_pool() as pool:
        long = await pool.run("print('a' * 150)")
        assert long.output == "a" * 100 + "\n[50 more characters cut]"
        flood = await pool.run("print('a' * 10**6)")
        assert flood.output.startswith("a" * 100 + "\n[")
        assert len(flood.output) < 200
        failed = await pool.run("raise ValueError('b' * 10**5 + 'end')")
        assert failed.output.endswith("bend")
        assert len(failed.output) < 200


async def test_preloaded_modules_are_there():
    async with running_pool(preload_modules=["numpy"]) as pool:
        assert (await pool.run("import sys; print('numpy' in sys.modules)")).output == "True"


async def test_a_missing_preload_module_fails_at_start_naming_it():
    with pytest.raises(InputError) as caught:
        await start_pool(preload_modules=["no_such_module"])
    assert "preload_modules=['no_such_module']" in caught.value.cause


async def test_lost_sandbox_is_replaced_and_runs_nothing_twice(pool):
    sandbox = pool._idle[-1]
    inner = descendants(sandbox.pid)
    os.kill(sandbox.pid, signal.SIGKILL)
    assert not wait_until_gone(inner)
    before = pool.num_replaced
    results = [await pool.run(f"print({i})") for i in range(3)]
    assert [result.output for result in results] == ["0", "1", "2"]  # not started: repeated
    assert pool.num_replaced == before + 1
    code, name = named("import time; time.sleep(600)")
    running = asyncio.create_task(pool.run(code, 600))
    await asyncio.to_thread(wait_until_running, name)
    busy = next(box for box in pool._sandboxes if box not in pool._idle)
    os.kill(busy.pid, signal.SIGKILL)
    lost = await running
    assert lost.status is ToolStatus.infra_error  # it had started
    assert await is_healthy(pool)


async def test_a_sandbox_lost_for_memory_is_an_error_of_its_call(monkeypatch):
    """The code can take all memory of a stateless sandbox, where it is alone."""
    async with running_pool() as pool:
        monkeypatch.setattr(cgroup.Cgroup, "num_oom_kills", 2)  # as the kernel counts
        code, name = named("import time; time.sleep(600)")
        running = asyncio.create_task(pool.run(code, 600))
        await asyncio.to_thread(wait_until_running, name)
        (sandbox,) = pool._sandboxes
        os.kill(sandbox.pid, signal.SIGKILL)
        result = await running
        assert (result.status, result.num_oom_kills) == (ToolStatus.user_error, 2)
        assert (await pool.run("print(1)")).output == "1"


async def test_no_error_of_a_call_leaks_its_sandbox(monkeypatch):
    """Whatever is raised while a thread has a sandbox: the sandbox is replaced and counted."""

    def fail(sandbox, code, timeout_s, cancel_token):
        raise KeyError(code)

    async with running_pool() as pool:
        (first,) = pool._sandboxes
        with monkeypatch.context() as patch:
            patch.setattr(client.Sandbox, "call", fail)
            with pytest.raises(KeyError):
                await pool.run("x")
        assert (pool._sandboxes, pool.num_replaced) == (set(), 1)
        assert not wait_until_gone([first.pid])
        assert (await pool.run("print(1)")).output == "1"
        assert [*pool._sandboxes] == pool._idle


async def test_a_session_that_cannot_join_its_group_costs_no_other(monkeypatch):
    def refuse(group, pid):
        raise PermissionError(1, "not moved")

    async with running_pool(mode=PythonMode.stateful) as pool:
        session = await pool.open()
        await session.run("x = 5")
        with monkeypatch.context() as patch:
            patch.setattr(cgroup.Cgroup, "add", refuse)
            with pytest.raises(client.SandboxLostError):
                await pool.open()
        assert (await session.run("print(x)")).output == "5"
        assert pool.num_replaced == 0
        await session.close()


async def test_hung_supervisor_is_infra_error(monkeypatch):
    grace_s = client._REPLY_GRACE_S
    async with running_pool() as pool:
        # The host gives up after a second, long before the call's limit: nothing else ends it.
        monkeypatch.setattr(client, "_REPLY_GRACE_S", -599.0)
        code, name = named("import time; time.sleep(600)")
        running = asyncio.create_task(pool.run(code, 600.0))
        await asyncio.to_thread(wait_until_running, name)
        (sandbox,) = pool._sandboxes
        inner = descendants(sandbox.pid)
        for pid in inner:
            os.kill(pid, signal.SIGSTOP)
        assert (await running).status is ToolStatus.infra_error
        monkeypatch.setattr(client, "_REPLY_GRACE_S", grace_s)
        assert (await pool.run("print(1)")).output == "1"
        assert not wait_until_gone(inner)


def test_close_ends_everything_at_once():
    pool = asyncio.run(start_pool(num_workers=2))
    outer = [box.pid for box in pool._sandboxes]
    inner = [pid for root in outer for pid in descendants(root)]
    assert len(inner) >= 4
    results = []
    code, name = named("import time; time.sleep(600)")

    def call_from_another_loop():
        results.append(asyncio.run(pool.run(code, 600)))

    threads = [threading.Thread(target=call_from_another_loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until_running(name, 2)
    pool.close_now()
    for thread in threads:
        thread.join(120)
    assert [result.status for result in results] == [ToolStatus.infra_error] * 4
    assert not wait_until_gone((*outer, *inner))
    pool.close_now()
    assert asyncio.run(pool.run("print(1)")).status is ToolStatus.infra_error


def test_sandboxes_die_with_their_owner():
    program = (
        "import asyncio, os, time\n"
        "from mega_agentrl.config.sections.tools import PythonToolConfig\n"
        "from mega_agentrl.sandbox.pool import SandboxPool\n"
        "pool = SandboxPool(PythonToolConfig(num_workers=1, preload_modules=[]))\n"
        "asyncio.run(pool.start())\n"
        "print(*(box.pid for box in pool._sandboxes), flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(pool_module.__file__).parents[2]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as owner:
        (pid,) = owner.stdout.readline().split()
        owner.kill()
    assert not wait_until_gone([int(pid)])


async def test_many_concurrent_calls_get_their_own_answers(pool):
    results = await asyncio.gather(*(pool.run(f"print({i} * {i})") for i in range(30)))
    assert [result.output for result in results] == [str(i * i) for i in range(30)]

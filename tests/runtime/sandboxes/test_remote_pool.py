"""Hosts as real Ray actors: the pool's interface, and what a dead, stuck or missing one does."""

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

import mega_agentrl
from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.runtime.sandboxes.remote_pool import RemoteSandboxPool, RemoteSandboxSession
from mega_agentrl.sandbox.pool import SandboxPool
from mega_agentrl.sandbox.session import STATE_LOST_NOTE, SandboxSession
from mega_agentrl.types.records import ToolStatus
from tests.processes import cpu_s, descendants, is_alive

SLEEP = "import time; time.sleep(500)"
SPIN = "while True: pass"


def make_pool(folder, **changes):
    values = {"num_hosts": 1, "num_workers": 1, "preload_modules": [], "timeout_s": 200.0}
    config = PythonToolConfig(**(values | changes))
    pool = RemoteSandboxPool(config, folder, host_timeout_s=300.0)  # a slow host is not lost
    asyncio.run(pool.start())
    return pool


@pytest.fixture(scope="module")
def pool(ray_local, tmp_path_factory):
    """Two hosts with sessions; every test leaves them up and empty."""
    folder = tmp_path_factory.mktemp("logs")
    made = make_pool(folder, num_hosts=2, num_workers=2, mode=PythonMode.stateful)
    yield made
    made.close_now()


def clients(pool):
    return dict(pool._supervisor._clients)


def pid_of(client):
    return int(re.search(r"process (\d+)", client.name).group(1))


async def until(done, *, timeout_s=300.0):
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.05)


async def all_up(pool, number=2):
    await until(lambda: len(clients(pool)) == number)


@pytest.mark.parametrize(
    ("near", "far"),
    [(SandboxPool, RemoteSandboxPool), (SandboxSession, RemoteSandboxSession)],
    ids=["pool", "session"],
)
def test_interface_matches_the_local_pool(near, far):
    def public(kind):
        return {
            name: [*inspect.signature(member).parameters] if callable(member) else None
            for name, member in vars(kind).items()
            if not name.startswith("_")
        }

    assert public(near) == public(far)


async def test_many_calls_spread_over_the_hosts(pool):
    calls = [asyncio.create_task(pool.run(f"print({i} * {i})")) for i in range(12)]
    await asyncio.sleep(0)
    assert [client.load for client in clients(pool).values()] == [6, 6]
    results = await asyncio.gather(*calls)
    assert [result.output for result in results] == [str(i * i) for i in range(12)]
    assert [client.load for client in clients(pool).values()] == [0, 0]


async def test_sessions_stay_on_their_host_and_new_ones_spread(pool):
    sessions = await asyncio.gather(*(pool.open() for _ in range(4)))
    assert [client.num_sessions for client in clients(pool).values()] == [2, 2]
    for n, session in enumerate(sessions):
        await session.run(f"x = [{n}]")
    child = await sessions[1].fork()
    assert child._client is sessions[1]._client
    await child.run("x.append('child')")
    outputs = [(await session.run("print(x)")).output for session in (*sessions, child)]
    assert outputs == ["[0]", "[1]", "[2]", "[3]", "[1, 'child']"]
    assert (await child.run(f"print(len('{'x' * 300_000}'))")).output == "300000"
    assert (await child.run("\ud800")).status is ToolStatus.user_error
    for session in (*sessions, child):
        await session.close()
        await session.close()
    assert [client.num_sessions for client in clients(pool).values()] == [0, 0]
    with pytest.raises(RuntimeError):
        await child.fork()
    assert (await child.run("1")).output == "the session is closed"


async def test_cancellation_ends_the_call_on_its_host(pool):
    session = await pool.open()
    await session.run("x = 1")
    calls = [asyncio.create_task(session.run(SPIN, 500))]
    host = pid_of(session._client)
    before_s = cpu_s(descendants(host))
    await until(lambda: cpu_s(descendants(host)) > before_s + 0.2)  # it is running
    calls += [asyncio.create_task(pool.run(SLEEP, 500)) for _ in range(6)]
    await asyncio.sleep(0.2)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert sum(client.load for client in clients(pool).values()) == 1  # the session
    after = await session.run("print('x' in dir())")
    assert after.state_lost
    assert after.output == f"{STATE_LOST_NOTE}\nFalse"
    results = await asyncio.gather(*(pool.run("print(1)") for _ in range(8)))
    assert {result.output for result in results} == {"1"}
    await session.close()


async def test_killed_host_fails_its_calls_and_sessions_and_is_replaced(pool):
    sessions = [await pool.open() for _ in range(2)]
    for session in sessions:
        await session.run("x = 1")
    lost, surviving = sessions
    calls = [
        asyncio.create_task(lost.run(SLEEP, 500)),
        asyncio.create_task(surviving.run("print(x)")),
    ]
    assert (await calls[1]).output == "1"
    pid = pid_of(lost._client)
    sandboxes = descendants(pid)
    assert len(sandboxes) >= 4
    replaced = pool.num_replaced
    os.kill(pid, signal.SIGKILL)
    result = await calls[0]
    assert result.status is ToolStatus.infra_error
    assert re.search(r"sandbox host \d \(node .*\) died; its log file", result.output)
    assert (await lost.run("print(x)")).output.startswith("the interpreter's state is lost: ")
    with pytest.raises(RuntimeError):
        await lost.fork()
    await until(lambda: not any(map(is_alive, sandboxes)))
    await until(lambda: pool.num_replaced != replaced)  # its calls may fail before it is replaced
    assert pool.num_replaced == replaced + 2
    await all_up(pool)
    results = await asyncio.gather(*(pool.run("print(1)") for _ in range(8)))
    assert {result.output for result in results} == {"1"}
    assert (await surviving.run("print(x)")).output == "1"
    for session in sessions:
        await session.close()


@pytest.mark.extended
async def test_call_without_a_session_survives_its_host(pool):
    calls = [
        asyncio.create_task(pool.run("import time; time.sleep(2); print(1)")) for _ in range(4)
    ]
    await asyncio.sleep(0.2)
    os.kill(pid_of(clients(pool)[0]), signal.SIGKILL)
    assert {(await call).output for call in calls} == {"1"}
    await all_up(pool)


@pytest.mark.extended
async def test_stopped_host_fails_its_calls_and_is_replaced(pool, monkeypatch):
    monkeypatch.setattr(pool._supervisor, "_timeout_s", 5.0)
    session = await pool.open()
    stuck = session._client
    sandboxes = [pid_of(stuck), *descendants(pid_of(stuck))]
    os.kill(pid_of(stuck), signal.SIGSTOP)
    try:
        result = await session.run("print(1)", 1.0)
        assert result.status is ToolStatus.infra_error
        assert "did not answer for 5 s" in result.output
        monkeypatch.undo()
        assert (await pool.run("print(2)")).output == "2"
        await all_up(pool)
        await until(lambda: not any(map(is_alive, sandboxes)))
    finally:
        if is_alive(pid_of(stuck)):
            os.kill(pid_of(stuck), signal.SIGKILL)
    await session.close()


async def test_sessions_need_the_stateful_mode(tmp_path):
    pool = RemoteSandboxPool(PythonToolConfig(mode=PythonMode.stateless, num_hosts=1), tmp_path)
    with pytest.raises(ConfigError) as caught:
        await pool.open()
    assert (caught.value.key, caught.value.got) == ("tool.python.mode", PythonMode.stateless)


@pytest.mark.extended
async def test_calls_wait_for_the_replacement_of_the_only_host(ray_local, tmp_path):
    pool = await asyncio.to_thread(make_pool, tmp_path)
    try:
        first = clients(pool)[0]
        os.kill(pid_of(first), signal.SIGKILL)
        await until(lambda: not clients(pool))
        results = await asyncio.gather(*(pool.run("print(1)") for _ in range(4)))
        assert {result.output for result in results} == {"1"}
        running = asyncio.create_task(pool.run(SLEEP, 500))
        await asyncio.sleep(0.5)
        await pool.close()
        assert (await running).output == "the sandbox pool is closed"
        assert (await pool.run("print(1)")).status is ToolStatus.infra_error
    finally:
        pool.close_now()
    assert (tmp_path / "sandbox-host0.log").is_file()


async def test_host_that_cannot_start_is_an_error(ray_local, tmp_path):
    config = PythonToolConfig(num_hosts=1, num_workers=1, preload_modules=["no_such_module"])
    pool = RemoteSandboxPool(config, tmp_path)
    with pytest.raises(ConfigError) as caught:
        await pool.start()
    assert (caught.value.key, caught.value.got) == ("tool.python.num_hosts", 1)
    assert "no_such_module" in caught.value.cause, "the error of the host reaches the user"
    assert (await pool.run("1")).status is ToolStatus.infra_error


DRIVER = """
import asyncio, logging, sys
from pathlib import Path

import ray

from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.runtime.sandboxes.remote_pool import RemoteSandboxPool

ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)


async def main():
    pool = RemoteSandboxPool(PythonToolConfig(num_hosts=1, preload_modules=[]), Path(sys.argv[2]))
    await pool.start()
    print(pool._supervisor._clients[0].name, flush=True)
    await pool.run("import time; time.sleep(500)", 500)


asyncio.run(main())
"""


@pytest.mark.extended
async def test_hosts_and_sandboxes_die_with_the_driver(ray_local, tmp_path):
    address = ray.get_runtime_context().gcs_address
    root = Path(mega_agentrl.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", DRIVER, address, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as driver:
        try:
            outputs = (await asyncio.to_thread(driver.stdout.readline)).decode()
            host = int(re.search(r"process (\d+)", outputs).group(1))
            await until(lambda: len(descendants(host)) >= 3)
            there = [host, *descendants(host)]
        finally:
            driver.kill()
    await until(lambda: not any(map(is_alive, there)))

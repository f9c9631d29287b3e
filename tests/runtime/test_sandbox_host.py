"""One host: calls by number, sessions by the number that made them, order and cancellation."""

import asyncio
import itertools

import pytest
import ray

from mega_agentrl.config.choices import PythonMode
from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.runtime.sandbox_host import SandboxHost
from mega_agentrl.types.records import ToolStatus

NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def host(ray_local, tmp_path_factory):
    config = PythonToolConfig(mode=PythonMode.stateful, workers=2, preload=[])
    log_file = tmp_path_factory.mktemp("logs") / "host.log"
    made = ray.remote(num_cpus=0, max_concurrency=1000)(SandboxHost).remote(config, str(log_file))
    ray.get(made.start.remote(), timeout=300)
    yield made
    ray.get(made.close.remote(), timeout=20)
    ray.kill(made)


async def opened(host):
    number = next(NUMBERS)
    assert await host.open.remote(number) == ""
    return number


async def said(host, session, code):
    result = await host.run_in.remote(next(NUMBERS), session, code, None)
    assert result.status is ToolStatus.ok, result.output
    return result.output


async def test_sessions_by_their_numbers(host):
    session, child = await opened(host), next(NUMBERS)
    await said(host, session, "x = 1")
    assert await host.fork.remote(child, session) == ""
    await said(host, child, "x += 1")
    assert await said(host, session, "print(x)") == "1"
    assert await said(host, child, "print(x)") == "2"
    for one in (session, child, child):
        await host.close_session.remote(one)
    closed = await host.run_in.remote(next(NUMBERS), child, "print(x)", None)
    assert closed.status is ToolStatus.infra_error
    assert closed.output == "the session is closed"
    assert "it is closed" in await host.fork.remote(next(NUMBERS), child)


async def test_a_call_that_comes_after_its_cancellation_does_not_run(host):
    session, run, fork, make = await opened(host), *itertools.islice(NUMBERS, 3)
    for number in (run, fork, make):
        await host.cancel.remote(number)
    result = await host.run_in.remote(run, session, "x = 1", None)
    assert (result.status, result.output) == (ToolStatus.infra_error, "the call was cancelled")
    assert await host.fork.remote(fork, session) == "the call was cancelled"
    assert await host.open.remote(make) == "the call was cancelled"
    assert await said(host, session, "print('x' in dir())") == "False"
    await host.close_session.remote(session)


async def test_a_call_that_was_overtaken_does_not_run(host):
    session, early, late = await opened(host), next(NUMBERS), next(NUMBERS)
    assert (await host.run_in.remote(late, session, "x = 'late'", None)).status is ToolStatus.ok
    result = await host.run_in.remote(early, session, "x = 'early'", None)
    assert result.status is ToolStatus.infra_error
    assert "did not run" in result.output
    assert await said(host, session, "print(x)") == "late"
    await host.close_session.remote(session)


async def test_cancelling_ends_what_runs_and_what_was_made(host):
    session, number = await opened(host), next(NUMBERS)
    running = host.run_in.remote(number, session, "import time; time.sleep(600)", 600)
    await asyncio.sleep(0.3)
    await host.cancel.remote(number)
    assert (await running).output == "the call was cancelled"
    await host.cancel.remote(session)  # by the number of the call that opened it
    assert (await host.run_in.remote(next(NUMBERS), session, "1", None)).output == (
        "the session is closed"
    )


async def test_more_calls_wait_than_sandboxes_are_there_and_the_pulse_goes_on(host):
    code = "import time; time.sleep(0.05); print(1)"
    calls = [host.run.remote(next(NUMBERS), code, None) for _ in range(60)]
    assert await host.ping.remote() == 0
    _, waiting = ray.wait(calls, num_returns=len(calls), timeout=0)
    assert waiting, "all were over before it was heard"
    assert {result.output for result in await asyncio.gather(*calls)} == {"1"}


async def test_it_says_where_it_is(host):
    node, words = await host.where.remote()
    assert node == ray.get_runtime_context().get_node_id()
    assert words.startswith("node ")

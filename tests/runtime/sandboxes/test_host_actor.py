"""One host: order and cancellation of calls; what it runs is tested with the pool."""

import asyncio
import itertools

import pytest
import ray

from mega_agentrl.config.enums import PythonMode
from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.runtime.sandboxes.host_actor import SandboxHostActor
from mega_agentrl.types.records import ToolStatus

CALL_IDS = itertools.count(1)


@pytest.fixture(scope="module")
def host(ray_local, tmp_path_factory):
    config = PythonToolConfig(mode=PythonMode.stateful, num_workers=2, preload_modules=[])
    log_file = tmp_path_factory.mktemp("logs") / "host.log"
    actor = ray.remote(num_cpus=0, max_concurrency=1000)(SandboxHostActor).remote(
        config, str(log_file)
    )
    ray.get(actor.start.remote(), timeout=300)
    yield actor
    ray.get(actor.close.remote(), timeout=300)
    ray.kill(actor)


async def open_session(host):
    call_id = next(CALL_IDS)
    assert await host.open.remote(call_id) == ""
    return call_id


async def run_in_session(host, session, code):
    result = await host.run_in_session.remote(next(CALL_IDS), session, code, None)
    assert result.status is ToolStatus.ok, result.output
    return result.output


async def test_call_that_arrives_after_its_cancellation_does_not_run(host):
    session, run, fork, make = await open_session(host), *itertools.islice(CALL_IDS, 3)
    for call_id in (run, fork, make):
        await host.cancel.remote(call_id)
    result = await host.run_in_session.remote(run, session, "x = 1", None)
    assert (result.status, result.output) == (ToolStatus.infra_error, "the call was cancelled")
    assert await host.fork.remote(fork, session) == "the call was cancelled"
    assert await host.open.remote(make) == "the call was cancelled"
    assert await run_in_session(host, session, "print('x' in dir())") == "False"
    await host.close_session.remote(session)


async def test_call_overtaken_by_a_later_one_does_not_run(host):
    session, early, late = await open_session(host), next(CALL_IDS), next(CALL_IDS)
    await host.run_in_session.remote(late, session, "x = 'late'", None)
    result = await host.run_in_session.remote(early, session, "x = 'early'", None)
    assert result.status is ToolStatus.infra_error
    assert "did not run" in result.output
    assert await run_in_session(host, session, "print(x)") == "late"
    await host.close_session.remote(session)


async def test_cancel_ends_a_running_call_and_a_created_session(host):
    session, call_id = await open_session(host), next(CALL_IDS)
    running = host.run_in_session.remote(call_id, session, "import time; time.sleep(500)", 500)
    await asyncio.sleep(0.3)
    await host.cancel.remote(call_id)
    assert (await running).output == "the call was cancelled"
    await host.cancel.remote(session)  # by the number of the call that opened it
    closed = await host.run_in_session.remote(next(CALL_IDS), session, "1", None)
    assert (closed.status, closed.output) == (ToolStatus.infra_error, "the session is closed")
    assert "it is closed" in await host.fork.remote(next(CALL_IDS), session)
    await host.close_session.remote(session)


async def test_ping_is_answered_while_calls_wait_for_sandboxes(host):
    call_ids = list(itertools.islice(CALL_IDS, 60))
    code = "import time; time.sleep(500)"
    calls = [host.run.remote(call_id, code, 500) for call_id in call_ids]
    assert await host.ping.remote() == 0
    for call_id in call_ids:
        await host.cancel.remote(call_id)
    assert {result.output for result in await asyncio.gather(*calls)} == {"the call was cancelled"}

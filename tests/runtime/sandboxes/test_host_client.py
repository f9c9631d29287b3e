"""The driver's end of a host: failures, death and cutting; all else is tested with the pool."""

import asyncio
import os
import time

import pytest
import ray

from mega_agentrl.runtime.sandboxes.host_client import HostClient
from mega_agentrl.sandbox.client import SandboxLostError


@ray.remote(num_cpus=0, max_concurrency=100)
class Host:
    def __init__(self):
        self.cancelled = []

    async def fail(self, number):
        raise KeyError("no such thing")

    async def hang(self, number):
        await asyncio.sleep(600)

    async def die(self, number):
        os._exit(1)

    async def cancel(self, number):
        self.cancelled.append(number)

    async def cancelled_calls(self):
        return self.cancelled


@pytest.fixture
def client(ray_local):
    made = HostClient("sandbox host 7", Host.remote())
    yield made
    ray.kill(made.actor)


async def test_failure_and_death_name_the_host(client):
    with pytest.raises(SandboxLostError, match=r"sandbox host 7.*no such thing"):
        await client.call(1, "fail")
    with pytest.raises(SandboxLostError, match="sandbox host 7 died") as caught:
        await client.call(2, "die")
    assert caught.value.may_have_run


async def test_mark_lost_fails_all_calls_and_sends_no_more(client):
    client.num_sessions = 2
    calls = [asyncio.create_task(client.call(client.next_call_id(), "hang")) for _ in range(3)]
    await asyncio.sleep(0.2)
    assert client.load == 5
    begin = time.monotonic()
    client.mark_lost("it was silent")
    client.mark_lost("twice")
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - begin < 60
    assert [(str(error), error.may_have_run) for error in results] == [("it was silent", True)] * 3
    with pytest.raises(SandboxLostError, match="it was silent") as caught:
        await client.call(client.next_call_id(), "fail")
    assert not caught.value.may_have_run
    client.notify("cancel", 9)
    assert await client.actor.cancelled_calls.remote() == []

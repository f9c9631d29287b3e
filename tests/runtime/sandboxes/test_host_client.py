"""The driver's end of a host: failures, death and cutting; all else is tested with the pool."""

import asyncio
import os

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
        await asyncio.sleep(500)

    async def die(self, number):
        os._exit(1)

    async def cancel(self, number):
        self.cancelled.append(number)

    async def cancelled_calls(self):
        return self.cancelled


@pytest.fixture(scope="module")
def host(ray_local):
    return Host.remote()


@pytest.fixture
def client(host):
    return HostClient("sandbox host 7", host)


async def test_mark_lost_fails_all_calls_and_sends_no_more(client):
    client.num_sessions = 2
    calls = [asyncio.create_task(client.call(client.next_call_id(), "hang")) for _ in range(3)]
    await asyncio.sleep(0)
    assert client.load == 5
    client.mark_lost("it was silent")
    client.mark_lost("twice")
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [(str(error), error.may_have_run) for error in results] == [("it was silent", True)] * 3
    with pytest.raises(SandboxLostError) as caught:
        await client.call(client.next_call_id(), "fail")
    assert (str(caught.value), caught.value.may_have_run) == ("it was silent", False)
    client.notify("cancel", 9)
    assert await client.actor.cancelled_calls.remote() == []


async def test_failure_and_death_name_the_host(client):
    for number, method in enumerate(("fail", "die")):
        with pytest.raises(SandboxLostError) as caught:
            await client.call(number, method)
        assert f"sandbox host 7{' died' * number}" in str(caught.value), "the policy reads it"
        assert caught.value.may_have_run

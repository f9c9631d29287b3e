"""The driver's end of a host: answers, failures, death, cutting and cancelling."""

import asyncio
import os
import time

import pytest
import ray

from mega_agentrl.runtime.sandbox_link import HostLink
from mega_agentrl.sandbox.supervisor import SandboxLostError


@ray.remote(num_cpus=0, max_concurrency=100)
class Host:
    def __init__(self):
        self.cancelled = []

    async def double(self, number, value):
        return number, 2 * value

    async def fail(self, number):
        raise KeyError("no such thing")

    async def hang(self, number):
        await asyncio.sleep(600)

    async def die(self, number):
        os._exit(1)

    async def cancel(self, number):
        self.cancelled.append(number)

    async def seen(self):
        return self.cancelled


@pytest.fixture
def link(ray_local):
    made = HostLink("sandbox host 7", Host.remote())
    yield made
    ray.kill(made.actor)


async def test_answers_come_back_by_number(link):
    numbers = [link.new_number() for _ in range(20)]
    assert numbers == sorted(set(numbers))
    answers = await asyncio.gather(*(link.ask(n, "double", n * n) for n in numbers))
    assert answers == [(n, 2 * n * n) for n in numbers]
    assert link.load == 0


async def test_failure_and_death_name_the_host_and_may_have_run(link):
    with pytest.raises(SandboxLostError, match=r"fail failed on sandbox host 7.*no such thing"):
        await link.ask(1, "fail")
    with pytest.raises(SandboxLostError, match="die: sandbox host 7 died; its log") as caught:
        await link.ask(2, "die")
    assert caught.value.started


async def test_a_cut_ends_every_call_at_once_and_lets_none_out(link):
    link.num_sessions = 2
    calls = [asyncio.create_task(link.ask(link.new_number(), "hang")) for _ in range(3)]
    await asyncio.sleep(0.2)
    assert link.load == 5
    begin = time.monotonic()
    link.cut("it was silent")
    link.cut("twice")
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - begin < 60
    assert [(str(error), error.started) for error in results] == [("it was silent", True)] * 3
    with pytest.raises(SandboxLostError, match="it was silent") as caught:
        await link.ask(link.new_number(), "double", 1)
    assert not caught.value.started
    link.tell("cancel", 9)
    assert await link.actor.seen.remote() == []


async def test_cancelling_tells_the_host(link):
    number = link.new_number()
    call = asyncio.create_task(link.ask(number, "hang"))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert link.load == 0
    deadline = time.monotonic() + 300
    while not (seen := await link.actor.seen.remote()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)  # calls may overtake each other
    assert seen == [number]


def test_it_serves_one_event_loop_after_the_other(link):
    for number in (1, 2):
        assert asyncio.run(link.ask(number, "double", 3)) == (number, 6)

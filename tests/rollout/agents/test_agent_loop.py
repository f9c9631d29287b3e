"""Agents run on a loop and in threads of their own, where they hold up nobody but each other."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading

import pytest

from mega_agentrl.rollout.agents.agent_loop import AgentLoop
from mega_agentrl.types.records import StopReason
from tests.rollout.agents.agent_run import grow, open_agent_loop, post


async def test_synchronous_tools_of_agents_take_no_threads_from_the_gateway(codec):
    num_agents = 20 + (os.cpu_count() or 1)  # more than asyncio's default executor has threads
    blocked = threading.Semaphore(0)
    release = threading.Event()
    numbers = iter(range(num_agents))

    def synchronous_tool():
        blocked.release()
        release.wait()

    async def agent(prompt, base_url, api_key):
        if next(numbers) < num_agents - 1:
            await asyncio.to_thread(synchronous_tool)
        else:
            for _ in range(num_agents - 1):
                await asyncio.to_thread(blocked.acquire)
            release.set()
        await post(base_url, api_key, "/chat/completions", {"model": "m", "messages": prompt})

    tree = await grow(codec, agent, group_size=num_agents)
    assert {item.stop_reason for item in tree.trajectories} == {StopReason.eos}


async def test_gateway_answers_while_an_agent_holds_the_loop(codec):
    """The first agent blocks the loop until a request from another thread has been answered."""
    answered = threading.Event()

    def ask(url, key, prompt):
        body = {"model": "m", "messages": prompt}
        asyncio.run(post(url, key, "/chat/completions", body))
        answered.set()

    async def agent(prompt, base_url, api_key):
        thread = threading.Thread(target=ask, args=(base_url, api_key, prompt))
        thread.start()
        answered.wait()
        thread.join()

    (trajectory,) = (await grow(codec, agent, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.eos


async def test_line_names_the_code_that_holds_the_loop(caplog):
    reported = threading.Event()

    class Reported(logging.Handler):
        def emit(self, record):
            reported.set()

    async def agent():
        reported.wait()
        return inspect.currentframe().f_code.co_firstlineno

    log = logging.getLogger("mega_agentrl.rollout.agents.agent_loop")
    handler = Reported(logging.WARNING)
    log.addHandler(handler)
    try:
        async with open_agent_loop(hold_limit_s=0.01) as loop:
            first_line = await loop.run(agent)
    finally:
        log.removeHandler(handler)
    assert f"{__file__}:{first_line + 1} in agent: reported.wait()" in caplog.text


async def test_cancellation_waits_for_the_end_of_the_agent():
    ended = []
    started = threading.Event()

    async def agent():
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async with open_agent_loop() as loop:
        running = asyncio.ensure_future(loop.run(agent))
        await asyncio.to_thread(started.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == [True]


@pytest.mark.parametrize("exits", ["itself", "in a task of its own"])
async def test_exit_of_an_agent_ends_neither_the_run_nor_the_loop(exits):
    async def leave():
        sys.exit(3)

    async def agent():
        if exits == "itself":
            await leave()
        with pytest.raises(SystemExit):
            await asyncio.create_task(leave())
        return "went on"

    async def other():
        return "answer"

    async with open_agent_loop() as loop:
        if exits == "itself":
            with pytest.raises(RuntimeError) as caught:
                await loop.run(agent)
            assert "sys.exit(3)" in str(caught.value)
        else:
            assert await loop.run(agent) == "went on"
        assert await loop.run(other) == "answer"


def test_end_of_the_run_does_not_wait_for_threads_that_block():
    started, release = threading.Event(), threading.Event()
    loop = AgentLoop()

    def block():
        started.set()
        release.wait()

    async def agent():
        await asyncio.to_thread(block)

    async def main():
        running = asyncio.ensure_future(loop.run(agent))
        await asyncio.to_thread(started.wait)
        running.cancel()
        await asyncio.wait({running})

    with loop:
        asyncio.run(main())
    release.set()


async def test_no_more_attempts_run_at_once_than_the_setting_allows(codec):
    running, most = 0, 0

    async def agent(prompt, base_url, api_key):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await post(base_url, api_key, "/chat/completions", {"model": "m", "messages": prompt})
        running -= 1

    tree = await grow(codec, agent, group_size=9, max_concurrent=3)
    assert most == 3
    assert not any(trajectory.failed for trajectory in tree.trajectories)

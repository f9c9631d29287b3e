"""Attempts of an agent whose time is over: whose time it was decides whether they are masked."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from mega_agentrl.rollout.agents import runner
from mega_agentrl.rollout.clock import TrajectoryClock
from mega_agentrl.rollout.gateway import session
from mega_agentrl.rollout.generation import turn_generator
from mega_agentrl.tool.function import tool
from mega_agentrl.types.records import FinishReason, StopReason
from tests.rollout.agents.agent_run import ask, grow, post
from tests.rollout.chat_run import make_kit
from tests.rollout.gateway.chat_policy import ChatPolicy


class ShortenedClock(TrajectoryClock):
    """A clock that a test shortens, from the thread of the agent."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loop = asyncio.get_running_loop()

    @property
    def waits_for_run(self):
        return self._waits_for_run

    def shorten(self):
        """Leave 50 ms on both clocks."""
        self._count_time()
        self._limit_s = max(self.policy_s, self.run_s) + 0.05
        self._update()


@pytest.fixture
def use_up_time(monkeypatch):
    """A function that leaves the last attempt 50 ms on both of its clocks."""
    clocks = []

    def record(*args, **kwargs):
        clocks.append(ShortenedClock(*args, **kwargs))
        return clocks[-1]

    async def use_up():
        clocks[-1].loop.call_soon_threadsafe(clocks[-1].shorten)
        await asyncio.sleep(1000)

    monkeypatch.setattr(runner, "TrajectoryClock", record)
    monkeypatch.setattr(turn_generator, "ABORT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(session, "CLOSE_TIMEOUT_S", 0.05)
    use_up.clocks = clocks
    return use_up


class StallingPolicy(ChatPolicy):
    """An engine that does not answer the second request."""

    def __init__(self, codec):
        super().__init__(codec, call_rate=0)
        self.stalls = threading.Event()
        self.is_aborted = asyncio.Event()

    async def generate(self, request):
        if not self.requests:
            return await super().generate(request)
        generation = await super().generate(request)
        self.stalls.set()
        await self.is_aborted.wait()
        nothing = dict.fromkeys(("token_ids", "logps", "entropies", "argmax_ids"), ())
        return replace(generation, finish_reason=FinishReason.aborted, **nothing)

    async def abort(self, request_id):
        self.is_aborted.set()


async def ask_in_vain(policy, prompt, base_url, api_key):
    """The task of a second request, once the engine has it."""
    messages = [*prompt, {"role": "user", "content": "More."}]
    asking = asyncio.create_task(ask(messages, base_url, api_key))
    while not policy.stalls.is_set():
        await asyncio.sleep(0.001)
    return asking


@pytest.mark.parametrize(
    ("place", "stop_reason"),
    [
        ("before an answer", StopReason.trajectory_timeout),
        ("after an answer", StopReason.time_limit),
        ("in the engine", StopReason.trajectory_timeout),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_time_that_the_policy_can_take_ends_an_attempt_that_is_scored(
    codec, place, stop_reason, use_up_time
):
    policy = StallingPolicy(codec)

    async def agent(prompt, base_url, api_key):
        if place != "before an answer":
            await ask(prompt, base_url, api_key)
        if place == "in the engine":
            await ask_in_vain(policy, prompt, base_url, api_key)
        await use_up_time()

    (trajectory,) = (await grow(codec, agent, policy=policy, group_size=1)).trajectories
    assert trajectory.stop_reason is stop_reason
    assert trajectory.failed == (stop_reason is StopReason.trajectory_timeout)
    assert "its time is over" in trajectory.turns[-1].outcome.answer
    if not trajectory.failed:
        assert trajectory.tool_rewards == {} and sum(trajectory.loss_mask) > 0


async def test_time_in_which_the_tools_of_the_run_keep_an_agent_waiting_is_the_runs(
    codec, use_up_time
):
    is_free = asyncio.Event()

    @tool(max_concurrent=1)
    async def look() -> str:
        """A tool whose one slot is taken."""
        await is_free.wait()
        return "seen"

    kit = make_kit(codec, look)
    other = kit.open_session()
    await other.create({})
    holding = asyncio.create_task(other.execute("look", {}))
    await asyncio.sleep(0)

    async def waits_for_a_slot(prompt, base_url, api_key):
        await ask(prompt, base_url, api_key)
        waiting = asyncio.create_task(post(base_url, api_key, "/tools/look", {}))
        while not use_up_time.clocks[-1].waits_for_run:
            await asyncio.sleep(0.001)
        await use_up_time()
        await waiting

    tree = await grow(codec, waits_for_a_slot, kit=kit, group_size=1)
    assert tree.trajectories[0].stop_reason is StopReason.trajectory_timeout
    is_free.set()
    await holding
    await other.release()


async def test_agent_that_ends_with_a_request_under_way_is_not_masked(codec):
    policy = StallingPolicy(codec)

    async def ends(prompt, base_url, api_key):
        await ask(prompt, base_url, api_key)
        await ask_in_vain(policy, prompt, base_url, api_key)
        return 0.5

    (trajectory,) = (await grow(codec, ends, policy=policy, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.eos
    assert trajectory.tool_rewards == {"agent": 0.5}

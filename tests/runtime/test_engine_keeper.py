"""Engines that die, hang or never come back, with small Ray actors in place of vLLM."""

import asyncio
import os
import signal
import time

import pytest
import ray

from mega_agentrl.config.schema import ClusterConfig, TrainConfig
from mega_agentrl.runtime import engine_keeper as module
from mega_agentrl.runtime.engine_keeper import EngineKeeper
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.remote import RankGoneError, RemoteError
from mega_agentrl.types.faults import EngineLostError
from mega_agentrl.types.records import GenerateRequest


@ray.remote(num_cpus=0, max_concurrency=64)
class Engine:
    """Answers with its own process; holds: `slow` requests are under way until it is released.
    What dies is its core.
    """

    def __init__(self, starts=True, holds=False):
        self.starts, self.holds, self.dead, self.num_running = starts, holds, False, 0

    async def call(self, method, *args):
        if self.dead:
            raise EngineLostError("engine is dead")
        if method == "die":
            self.dead = True
        if method == "release":
            self.holds = False
        if method == "running":
            return self.num_running
        if method == "generate" and "poison" in args[0].request_id:
            raise EngineLostError("engine is dead")
        if method == "generate" and "slow" in args[0].request_id:
            self.num_running += 1
            while self.holds:
                await asyncio.sleep(0.05)
                if self.dead:
                    raise EngineLostError("engine is dead")
        return os.getpid()

    async def start(self, model_path, seed, deadline_s):
        if not self.starts:
            raise RuntimeError("no memory")


class Bridge:
    """Notes whom it welcomed and how often it was asked to; busy: lets them wait. orphan: the
    policy is lost.
    """

    def __init__(self):
        self.welcomed, self.busy, self.orphan, self.num_asked = [], False, False, 0

    def welcome(self, engines):
        self.num_asked += 1
        if self.orphan:
            raise RankGoneError("policy rank 1 died")
        if not self.busy:
            self.welcomed += engines
        return not self.busy


@pytest.fixture
def kept(ray_local, request, monkeypatch):
    monkeypatch.setattr(module, "_TICK_S", 0.1)
    monkeypatch.setattr(module, "SILENCE_S", 300.0)  # a slow machine is not taken for a dead engine
    made = []
    starts = getattr(request, "param", True)

    def spawn(index):
        made.append(Engine.remote(starts))
        return made[-1]

    config = TrainConfig(
        cluster=ClusterConfig(num_engines=2, call_deadline_s=300.0),
    )
    actors = [Engine.remote(holds=True) for _ in range(2)]
    ray.get([actor.call.remote("probe") for actor in actors], timeout=300)
    engines = GeneratorGroup(actors, config, spawn)
    bridge = Bridge()
    keeper = EngineKeeper(engines, bridge)
    engines.keep(keeper)
    keeper.start()
    yield engines, bridge, keeper
    keeper.close()
    engines.close()


def ask(engines, name):
    return engines.generate(GenerateRequest(request_id=name, token_ids=(1, 2), max_tokens=4))


def pid(engines, index):
    return ray.get(engines.actor(index).call.remote("probe"), timeout=300)


async def until(condition, deadline_s=300):
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.05)


async def until_running(engines, index, count=1):
    """Until an engine has so many `slow` requests."""
    while await engines._ask(index, "running") < count:
        await asyncio.sleep(0.05)


async def asked(bridge, times):
    """Until the keeper has tried so often to bring the weights."""
    seen = bridge.num_asked
    await until(lambda: bridge.num_asked >= seen + times)


async def test_requests_of_a_dead_engine_go_to_the_others_and_it_comes_back(kept):
    engines, bridge, keeper = kept
    keeper.lost(0, object(), "old news: somebody else's process died")
    assert engines.admitted == [0, 1]
    both = [pid(engines, 0), pid(engines, 1)]
    running = [asyncio.create_task(ask(engines, f"{key}slow/0")) for key in "ab"]
    for index in (0, 1):
        await until_running(engines, index)
    os.kill(both[0], signal.SIGKILL)
    await until_running(engines, 1, 2)
    await engines._ask(1, "release")
    assert await asyncio.gather(*running) == [both[1], both[1]]
    await until(lambda: engines.admitted == [0, 1])
    assert bridge.welcomed == [0]
    assert pid(engines, 0) not in both
    assert keeper.num_replaced == 1


async def test_with_no_engine_left_requests_wait_for_the_successor(kept):
    engines, bridge, keeper = kept
    bridge.busy = True
    running = [asyncio.create_task(ask(engines, f"{key}slow/0")) for key in "ab"]
    for index in (0, 1):
        await until_running(engines, index)
    old = {pid(engines, index) for index in (0, 1)}
    for index in (0, 1):
        await engines._ask(index, "die")
    await until(lambda: keeper.fresh == {0, 1})
    assert not any(task.done() for task in running)
    bridge.busy = False
    assert not old & set(await asyncio.gather(*running))


async def test_an_engine_that_is_stopped_is_lost_though_its_process_is_there(
    kept, caplog, monkeypatch
):
    engines, _, keeper = kept
    stopped = pid(engines, 1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "SILENCE_S", 5.0)
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: "engine 1 is lost and replaced: it takes requests and" in caplog.text)
    await until(lambda: keeper.num_replaced >= 1)
    await until(lambda: engines.admitted == [0, 1])
    assert pid(engines, 1) != stopped


@pytest.mark.parametrize("kept", [False], indirect=True)
async def test_engines_that_never_come_back_are_given_up_with_an_error(kept):
    engines, _, _ = kept
    for index in (0, 1):
        await engines._ask(index, "die")
    with pytest.raises(RemoteError, match=r"no engine is left: engine . was lost 3 times"):
        async with asyncio.timeout(300):
            await ask(engines, "a/0")


async def test_a_request_that_kills_engine_after_engine_is_ended(kept):
    engines, _, keeper = kept
    with pytest.raises(RemoteError, match="engine is dead"):
        await ask(engines, "poison/0")
    await until(lambda: engines.admitted == [0, 1])
    assert keeper.num_replaced >= 3


async def test_a_lost_policy_is_said_once_and_told_to_who_waits_and_is_not_the_engines_fault(
    kept, caplog
):
    engines, bridge, keeper = kept
    bridge.orphan = True
    await engines._ask(1, "die")
    await until(lambda: keeper.fresh == {1})
    await asked(bridge, times=4)
    assert caplog.text.count("engine 1 waits for a new policy") == 1
    assert await ask(engines, "a/0"), "another one serves"
    waiting = asyncio.create_task(ask(engines, "aslow/0"))
    await until_running(engines, 0)
    await engines._ask(0, "die")
    with pytest.raises(RankGoneError, match=r"no engine has weights: policy rank 1 died"):
        async with asyncio.timeout(300):
            await waiting
    await until(lambda: keeper.fresh == {0, 1})
    await asked(bridge, times=12)  # often enough to lose an engine too often
    assert keeper.num_replaced == 2
    bridge.orphan = False
    await until(lambda: engines.admitted == [0, 1])
    assert await ask(engines, "b/0")


def test_mend_waits_for_the_successor_and_says_whether_there_was_one(kept):
    engines, bridge, keeper = kept
    assert not keeper.mend()
    bridge.busy = True
    os.kill(pid(engines, 0), signal.SIGKILL)
    assert keeper.mend()
    assert keeper.fresh == {0}
    assert engines.admitted == [1]

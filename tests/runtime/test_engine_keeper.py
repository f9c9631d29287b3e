"""Engines that die, hang or never come back, with small Ray actors in place of vLLM."""

import asyncio
import os
import signal
import time

import pytest
import ray

from mega_agentrl.config.schema import ClusterConfig, TrainConfig
from mega_agentrl.runtime.engine_keeper import EngineKeeper
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.remote import RankGoneError, RemoteError
from mega_agentrl.types.faults import EngineLostError
from mega_agentrl.types.records import GenerateRequest


@ray.remote(num_cpus=0, max_concurrency=64)
class Engine:
    """Answers with its own process; `slow` requests take a while. What dies is its core."""

    def __init__(self, starts=True):
        self.starts, self.dead = starts, False

    async def call(self, method, *args):
        if self.dead:
            raise EngineLostError("engine is dead")
        if method == "die":
            self.dead = True
        if method == "generate" and "poison" in args[0].request_id:
            raise EngineLostError("engine is dead")
        if method == "generate" and "slow" in args[0].request_id:
            for _ in range(30):
                await asyncio.sleep(0.1)
                if self.dead:
                    raise EngineLostError("engine is dead")
        return os.getpid()

    async def start(self, model_path, seed, deadline_s):
        if not self.starts:
            raise RuntimeError("no memory")


class Bridge:
    """Notes whom it welcomed; busy: lets them wait. orphan: the policy is lost."""

    def __init__(self):
        self.welcomed, self.busy, self.orphan = [], False, False

    def welcome(self, engines):
        if self.orphan:
            raise RankGoneError("policy rank 1 died")
        if not self.busy:
            self.welcomed += engines
        return not self.busy


@pytest.fixture
def kept(ray_local, request):
    made = []
    starts = getattr(request, "param", True)

    def spawn(index):
        made.append(Engine.remote(starts))
        return made[-1]

    config = TrainConfig(
        cluster=ClusterConfig(num_engines=2, call_deadline_s=60.0),
    )
    engines = GeneratorGroup([Engine.remote() for _ in range(2)], config, spawn)
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
    return ray.get(engines.actor(index).call.remote("probe"), timeout=30)


async def until(condition, deadline_s=60):
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.05)


async def test_requests_of_a_dead_engine_go_to_the_others_and_it_comes_back(kept):
    engines, bridge, keeper = kept
    both = [pid(engines, 0), pid(engines, 1)]
    running = [asyncio.create_task(ask(engines, f"{key}slow/0")) for key in "ab"]
    await asyncio.sleep(0.5)
    os.kill(both[0], signal.SIGKILL)
    assert await asyncio.gather(*running) == [both[1], both[1]]
    await until(lambda: engines.admitted == [0, 1])
    assert bridge.welcomed == [0]
    assert pid(engines, 0) not in both
    assert keeper.num_replaced == 1


async def test_with_no_engine_left_requests_wait_for_the_successor(kept):
    engines, bridge, keeper = kept
    bridge.busy = True
    running = [asyncio.create_task(ask(engines, f"{key}slow/0")) for key in "ab"]
    await asyncio.sleep(0.5)
    old = {pid(engines, index) for index in (0, 1)}
    for index in (0, 1):
        await engines._ask(index, "die")
    await until(lambda: keeper.fresh == {0, 1})
    assert not any(task.done() for task in running)
    bridge.busy = False
    assert not old & set(await asyncio.gather(*running))


async def test_an_engine_that_is_stopped_is_lost_though_its_process_is_there(
    kept, record_property, caplog
):
    engines, _, keeper = kept
    stopped = pid(engines, 1)
    start_s = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    await until(lambda: "engine 1 is lost and replaced: it takes requests and" in caplog.text)
    took_s = time.monotonic() - start_s
    record_property("named_after_s", took_s)
    assert took_s < 60, "twice the promised thirty seconds, as the machine may be busy"
    await until(lambda: keeper.num_replaced == 1)
    await until(lambda: engines.admitted == [0, 1])
    assert pid(engines, 1) != stopped


@pytest.mark.parametrize("kept", [False], indirect=True)
async def test_engines_that_never_come_back_are_given_up_with_an_error(kept):
    engines, _, _ = kept
    for index in (0, 1):
        await engines._ask(index, "die")
    with pytest.raises(RemoteError, match=r"no engine is left: engine . was lost 3 times"):
        async with asyncio.timeout(60):
            await ask(engines, "a/0")


async def test_a_request_that_kills_engine_after_engine_is_ended(kept):
    engines, _, keeper = kept
    with pytest.raises(RemoteError, match="engine is dead"):
        await ask(engines, "poison/0")
    await until(lambda: engines.admitted == [0, 1])
    assert keeper.num_replaced >= 3


async def test_a_lost_policy_is_told_to_who_waits_and_is_not_the_engines_fault(kept):
    engines, bridge, keeper = kept
    bridge.orphan = True
    waiting = asyncio.create_task(ask(engines, "aslow/0"))
    await asyncio.sleep(0.5)
    for index in (0, 1):
        await engines._ask(index, "die")
    with pytest.raises(RankGoneError, match=r"no engine has weights: policy rank 1 died"):
        async with asyncio.timeout(60):
            await waiting
    await until(lambda: keeper.fresh == {0, 1})
    await asyncio.sleep(5)  # ticks enough to lose an engine too often
    assert keeper.num_replaced == 2
    bridge.orphan = False
    await until(lambda: engines.admitted == [0, 1])
    assert await ask(engines, "b/0")


async def test_that_an_engine_waits_for_a_policy_is_said_once_though_another_one_serves(
    kept, caplog
):
    engines, bridge, keeper = kept
    bridge.orphan = True
    await engines._ask(1, "die")
    await until(lambda: keeper.fresh == {1})
    await asyncio.sleep(4)
    assert caplog.text.count("engine 1 waits for a new policy") == 1
    assert await ask(engines, "a/0")
    bridge.orphan = False
    await until(lambda: engines.admitted == [0, 1])


def test_mend_waits_for_the_successor_and_says_whether_there_was_one(kept):
    engines, bridge, keeper = kept
    assert not keeper.mend()
    bridge.busy = True
    os.kill(pid(engines, 0), signal.SIGKILL)
    assert keeper.mend()
    assert keeper.fresh == {0}
    assert engines.admitted == [1]


def test_old_news_are_passed_over(kept):
    engines, _, keeper = kept
    keeper.lost(0, object(), "somebody else's process died")
    assert engines.admitted == [0, 1]

"""Routing and errors of the engine group, with small Ray actors in place of vLLM."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from mega_agentrl.config.schema import ClusterConfig, TrainConfig
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.remote import RemoteError
from mega_agentrl.types.records import GenerateRequest


@ray.remote(num_cpus=0, max_concurrency=64)
class Engine:
    """Answers with its own index; `hang` never answers, `fail` raises."""

    def __init__(self, index):
        self.index = index
        self.calls = []

    async def forget(self):
        self.calls = []

    async def call(self, method, *args):
        self.calls.append((method, *args))
        if method == "generate" and "hang" in args[0].request_id:
            await asyncio.sleep(600)
        if method == "generate" and "fail" in args[0].request_id:
            raise RuntimeError("out of blocks")
        return self.index

    async def start(self, model_path, seed, deadline_s):
        pass

    async def seen(self):
        return self.calls


def group_of(actors, call_deadline_s=300.0):
    config = TrainConfig(
        cluster=ClusterConfig(num_engines=len(actors), call_deadline_s=call_deadline_s),
    )
    return GeneratorGroup(actors, config)


def new_group(num_engines):
    actors = [Engine.remote(index) for index in range(num_engines)]
    return group_of(actors), actors


@pytest.fixture(scope="module")
def pair(ray_local):
    """Two processes for all tests that leave them alive."""
    return [Engine.remote(index) for index in range(2)]


@pytest.fixture
def actors(pair):
    ray.get([actor.forget.remote() for actor in pair])
    return pair


async def until_seen(actor, what):
    """Until an engine was asked this."""
    while what not in (seen := await actor.seen.remote()):
        await asyncio.sleep(0.05)
    return seen


def request(name):
    return GenerateRequest(request_id=name, token_ids=(1, 2), max_tokens=4)


async def test_a_prompt_stays_on_its_engine_and_new_ones_spread(actors):
    engines = group_of(actors)
    first = asyncio.gather(*(engines.generate(request(f"a/{i}")) for i in range(4)))
    second = asyncio.gather(*(engines.generate(request(f"b/{i}")) for i in range(4)))
    homes = [set(await first), set(await second)]
    assert homes == [{0}, {1}]
    assert await engines.generate(request("b/9")) == 1


async def test_it_can_serve_while_one_engine_is_admitted(actors):
    engines = group_of(actors)
    assert engines.can_serve
    engines.dismiss(0)
    assert engines.can_serve
    engines.dismiss(1)
    assert not engines.can_serve
    engines.admit(0)
    assert engines.can_serve


async def test_deadline_and_failure_name_the_engine(actors):
    engines = group_of(actors[:1], call_deadline_s=1.0)
    with pytest.raises(RemoteError, match="generate: no answer within 1 s from engine 0"):
        await engines.generate(request("hang/0"))
    engines = group_of(actors[:1])
    with pytest.raises(RemoteError, match="generate failed on engine 0: RuntimeError"):
        await engines.generate(request("fail/0"))


async def test_dead_engine_is_named(ray_local):
    engines, actors = new_group(1)
    ray.kill(actors[0])
    with pytest.raises(RemoteError, match="engine 0 died"):
        await engines.generate(request("a/0"))


async def test_a_replaced_engine_gets_requests_once_it_is_admitted(ray_local):
    engines, actors = new_group(2)
    engines._spawn = Engine.remote
    homes = await asyncio.gather(*(engines.generate(request(f"{key}/0")) for key in "ab"))
    assert homes == [0, 1]
    index, starting = engines.begin_replace(1)
    engines.finish_start(starting)
    assert engines.admitted == [0]
    # Its prompts move to the other engine, and stay there.
    assert {await engines.generate(request(f"{key}/1")) for key in "abcd"} == {0}
    await engines.pause()
    engines.admit(index)
    assert await engines.generate(request("b/2")) == 0
    running = [asyncio.create_task(engines.generate(request(f"hang{n}/0"))) for n in range(2)]
    while not (seen := await engines._actors[1].seen.remote()):
        await asyncio.sleep(0.05)
    assert len(seen) == 1
    for task in running:
        task.cancel()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actors[1].seen.remote())


async def test_abort_reaches_the_engine_that_runs_the_request(actors):
    engines = group_of(actors)
    task = asyncio.create_task(engines.generate(request("hang/1")))
    await until_seen(actors[0], ("generate", request("hang/1")))
    await engines.abort("hang/1")
    await engines.abort("unknown")
    task.cancel()
    await until_seen(actors[0], ("abort", "hang/1"))
    assert not ray.get(actors[1].seen.remote())


async def test_entropies_of_a_request_that_does_not_run(actors):
    engines = group_of(actors[:1])
    with pytest.raises(ValueError, match="request_id=ghost"):
        await engines.entropies("ghost")


def test_engines_sleep_together_and_one_that_cannot_is_lost(ray_local):
    engines, actors = new_group(3)
    engines.dismiss(1)
    engines.sleep()
    engines.wake("cache", [2])
    seen = [ray.get(actor.seen.remote()) for actor in actors]
    assert seen == [[("sleep",)], [], [("sleep",), ("wake", "cache")]]
    ray.kill(actors[2])
    with pytest.raises(RemoteError, match="sleep: engine 2 died"):
        while True:  # calls still get through for a moment
            engines.sleep()
    lost = []
    engines.keep(SimpleNamespace(fresh={1}, lost=lambda index, actor, why: lost.append(index)))
    engines.sleep()
    assert lost == [2]
    assert ray.get(actors[1].seen.remote()) == [("sleep",)]

"""Routing and errors of the engine group, with small Ray actors in place of vLLM."""

import asyncio

import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.runtime import ClusterConfig
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
from mega_agentrl.types.records import GenerateRequest


@ray.remote(num_cpus=0, max_concurrency=64)
class FakeEngine:
    """Answers with its index; `hang` never answers, `fail` raises."""

    def __init__(self, index):
        self.index = index
        self.calls = []

    async def reset(self):
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

    async def recorded_calls(self):
        return self.calls


def group_of(actors, call_timeout_s=300.0):
    cluster = ClusterConfig(num_engines=len(actors), call_timeout_s=call_timeout_s)
    config = TrainConfig(cluster=cluster)
    return GeneratorGroup(actors, config, FakeEngine.remote)


def new_group(num_engines):
    actors = [FakeEngine.remote(index) for index in range(num_engines)]
    return group_of(actors), actors


@pytest.fixture(scope="module")
def pair(ray_local):
    """Two processes for all tests that leave them alive."""
    return [FakeEngine.remote(index) for index in range(2)]


@pytest.fixture
def actors(pair):
    ray.get([actor.reset.remote() for actor in pair])
    return pair


async def until_called(actor, what):
    """Wait until an engine received this call."""
    while what not in (seen := await actor.recorded_calls.remote()):
        await asyncio.sleep(0.05)
    return seen


def request(name):
    return GenerateRequest(request_id=name, token_ids=(1, 2), max_tokens=4)


async def test_prompt_stays_on_its_engine_and_new_prompts_spread(actors):
    engines = group_of(actors)
    first = asyncio.gather(*(engines.generate(request(f"a/{i}")) for i in range(4)))
    second = asyncio.gather(*(engines.generate(request(f"b/{i}")) for i in range(4)))
    engine_indices = [set(await first), set(await second)]
    assert engine_indices == [{0}, {1}]
    assert await engines.generate(request("b/9")) == 1


async def test_can_serve_while_one_engine_is_routable(actors):
    engines = group_of(actors)
    assert engines.can_serve
    engines.registry.routable.discard(0)
    assert engines.can_serve
    engines.registry.routable.discard(1)
    assert not engines.can_serve
    engines.enable_routing(0)
    assert engines.can_serve


async def test_deadline_and_failure_name_the_engine(actors):
    engines = group_of(actors[:1], call_timeout_s=1.0)
    with pytest.raises(RemoteCallError, match=r"generate: .* 1 s from engine 0"):
        await engines.generate(request("hang/0"))
    engines = group_of(actors[:1])
    with pytest.raises(RemoteCallError, match=r"generate .* engine 0: RuntimeError"):
        await engines.generate(request("fail/0"))


def test_lost_engine_on_shared_gpus_is_killed_at_once(ray_local):
    engines, actors = new_group(1)
    engines._config.cluster.colocated = True
    engines.report_lost(0, actors[0], "it hangs")
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # calls still get through for a moment
            ray.get(actors[0].recorded_calls.remote())


async def test_replaced_engine_gets_requests_once_routing_is_enabled(ray_local):
    engines, actors = new_group(2)
    engine_indices = await asyncio.gather(*(engines.generate(request(f"{key}/0")) for key in "ab"))
    assert engine_indices == [0, 1]
    engines.wait_started(engines.respawn_engine(1))
    assert engines.routable_engines == [0]
    # Its prompts move to the other engine, and stay there.
    assert {await engines.generate(request(f"{key}/1")) for key in "abcd"} == {0}
    await engines.pause()
    engines.enable_routing(1)
    assert await engines.generate(request("b/2")) == 0
    running = [asyncio.create_task(engines.generate(request(f"hang{n}/0"))) for n in range(2)]
    while not (seen := await engines._actors[1].recorded_calls.remote()):
        await asyncio.sleep(0.05)
    assert len(seen) == 1
    for task in running:
        task.cancel()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actors[1].recorded_calls.remote())


async def test_requests_fail_once_the_engines_are_closed(ray_local):
    engines, actors = new_group(1)
    running = asyncio.create_task(engines.generate(request("hang/0")))
    await until_called(actors[0], ("generate", request("hang/0")))
    engines.close()
    engines.close()
    for call in (running, engines.generate(request("a/0"))):
        with pytest.raises(RemoteCallError):
            await call
    assert not engines.can_serve
    await engines.pause()
    with pytest.raises(RemoteCallError):
        engines.respawn_engine(0)


async def test_abort_reaches_the_engine_that_runs_the_request(actors):
    engines = group_of(actors)
    task = asyncio.create_task(engines.generate(request("hang/1")))
    await until_called(actors[0], ("generate", request("hang/1")))
    await engines.abort("hang/1")
    await engines.abort("unknown")
    task.cancel()
    await until_called(actors[0], ("abort", "hang/1"))
    assert not ray.get(actors[1].recorded_calls.remote())


def test_engines_sleep_together_and_one_that_fails_is_lost(ray_local):
    engines, actors = new_group(3)
    engines.registry.routable.discard(1)
    engines.sleep()
    engines.wake_up("cache", [2])
    seen = [ray.get(actor.recorded_calls.remote()) for actor in actors]
    assert seen == [[("sleep",)], [], [("sleep",), ("wake_up", "cache")]]
    engines.registry.new_engines.add(1)
    ray.kill(actors[2])
    while not engines.registry.lost_reasons:  # calls still get through for a moment
        engines.sleep()
    assert engines.registry.lost_reasons.keys() == {2}
    assert engines.registry.live_engines == [0, 1]
    assert ("sleep",) in ray.get(actors[1].recorded_calls.remote())

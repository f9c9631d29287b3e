"""Engines that die, hang or never come back, with small Ray actors in place of vLLM."""

import asyncio
import itertools
import os
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig
from mega_agentrl.runtime.remote_calls import (
    NoEngineLeftError,
    PolicyRankDiedError,
    ProcessDiedError,
)
from mega_agentrl.runtime.workers import engine_supervisor as module
from mega_agentrl.runtime.workers.engine_supervisor import EngineSupervisor
from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
from mega_agentrl.types.errors import EngineLostError
from mega_agentrl.types.records import GenerateRequest
from tests.processes import wait_until_gone


@ray.remote(num_cpus=0, max_concurrency=64)
class EngineProcess:
    """Runs one engine after the other, each until it is killed or says that it is dead.

    The start and the `slow` requests of an engine wait while it `holds`.
    """

    def __init__(self):
        self.engine, self.num_running = 0, 0
        self.starts = self.holds = self.dead = False

    def create_engine(self, engine, starts, holds):
        self.engine, self.starts, self.holds = engine, starts, holds
        self.dead, self.num_running = False, 0

    def kill_engine(self, engine):
        self.dead |= engine == self.engine

    def pid(self):
        return os.getpid()

    async def call(self, engine, method, *args):
        """Answer with the number of the engine."""
        self.check_alive(engine)
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
            await self.wait_while_held(engine)
        return engine

    async def start(self, engine, model_path, seed, deadline_s):
        if not self.starts:
            raise RuntimeError("no memory")
        await self.wait_while_held(engine)

    async def wait_while_held(self, engine):
        while engine == self.engine and self.holds and not self.dead:
            await asyncio.sleep(0.02)
        self.check_alive(engine)

    def check_alive(self, engine):
        if engine != self.engine or self.dead:
            raise EngineLostError("engine is dead")


class Engine:
    """The handle of an engine, in place of the handle of an actor."""

    numbers = itertools.count()

    def __init__(self, process, *, starts=True, holds=False):
        self.process, self.number = process, next(self.numbers)
        self.call, self.start = self.method("call"), self.method("start")
        # Waits, because calls of an actor with coroutines may overtake each other.
        ray.get(process.create_engine.remote(self.number, starts, holds), timeout=300)

    def method(self, name):
        remote = getattr(self.process, name).remote
        return SimpleNamespace(remote=lambda *args: remote(self.number, *args))

    def pid(self):
        return ray.get(self.process.pid.remote(), timeout=300)


class Processes:
    """Processes that the tests share: `ray.kill` ends the engine of one, which runs the next."""

    def __init__(self):
        self.free, self.doomed, self.kill_actor = [], [], ray.kill

    def spawn(self, **settings):
        return Engine(self.free.pop(0) if self.free else EngineProcess.remote(), **settings)

    def signal(self, engine, number):
        """Send a signal to an engine's process, which is not used again."""
        self.doomed.append(engine.process)
        os.kill(engine.pid(), number)

    def kill(self, engine, no_restart=True):
        """Take the place of `ray.kill`."""
        if any(engine.process is one for one in self.doomed):
            self.kill_actor(engine.process)
            return
        engine.process.kill_engine.remote(engine.number)
        self.free.append(engine.process)


class FakeWeightSync:
    """Records which engines it synced.

    busy: the engines have to wait. policy_lost: a policy rank has died. broken: it has a bug.
    """

    def __init__(self):
        self.synced, self.num_attempts = [], 0
        self.busy = self.policy_lost = self.broken = False

    def sync_new_engines(self, engines):
        self.num_attempts += 1
        if self.policy_lost:
            raise PolicyRankDiedError("policy rank 1 died")
        if self.broken:
            raise KeyError("layer 3")
        if not self.busy:
            self.synced += engines
        return not self.busy


@pytest.fixture(scope="module")
def processes(ray_local):
    return Processes()


@pytest.fixture
def supervised(processes, request, monkeypatch):
    monkeypatch.setattr(module, "_CHECK_INTERVAL_S", 0.05)
    starts = getattr(request, "param", True)
    config = TrainConfig(
        cluster=ClusterConfig(num_engines=2, call_timeout_s=300.0),
        engine=EngineConfig(stuck_timeout_s=300.0),  # a slow machine is not taken for a dead engine
    )
    made = [processes.spawn(holds=True) for _ in range(2)]
    ray.get([engine.call.remote("check_health") for engine in made], timeout=300)
    engines = GeneratorGroup(made, config, lambda index: processes.spawn(starts=starts))
    weight_sync = FakeWeightSync()
    supervisor = EngineSupervisor(engines, weight_sync.sync_new_engines, nullcontext)
    monkeypatch.setattr(ray, "kill", processes.kill)
    supervisor.start()
    yield engines, weight_sync, supervisor
    supervisor.close()
    engines.close()


def generate(engines, name):
    return engines.generate(GenerateRequest(request_id=name, token_ids=(1, 2), max_tokens=4))


def number(engines, index):
    """Return the number by which an engine answers."""
    return ray.get(engines.actor(index).call.remote("check_health"), timeout=300)


async def until(condition, deadline_s=300):
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.02)


async def until_running(engines, index, count=1):
    """Wait until an engine runs `count` slow requests."""
    while await engines._call_engine(index, "running") < count:
        await asyncio.sleep(0.02)


async def until_sync_attempts(weight_sync, times):
    """Wait for `times` more attempts of the supervisor to sync new engines."""
    seen = weight_sync.num_attempts
    await until(lambda: weight_sync.num_attempts >= seen + times)


async def test_requests_of_a_dead_engine_are_retried_and_it_is_replaced(supervised, processes):
    engines, weight_sync, _ = supervised
    engines.report_lost(0, object(), "old news: somebody else's process died")
    assert engines.routable_engines == [0, 1]
    both = [number(engines, 0), number(engines, 1)]
    running = [asyncio.create_task(generate(engines, f"{key}slow/0")) for key in "ab"]
    for index in (0, 1):
        await until_running(engines, index)
    processes.signal(engines.actor(0), signal.SIGKILL)
    await until_running(engines, 1, 2)
    await engines._call_engine(1, "release")
    assert await asyncio.gather(*running) == [both[1], both[1]]
    await until(lambda: engines.routable_engines == [0, 1])
    assert weight_sync.synced == [0]
    assert number(engines, 0) not in both
    assert engines.registry.num_replaced == 1


async def test_requests_wait_for_a_replacement_when_no_engine_is_left(supervised):
    engines, weight_sync, _ = supervised
    weight_sync.busy = True
    running = [asyncio.create_task(generate(engines, f"{key}slow/0")) for key in "ab"]
    for index in (0, 1):
        await until_running(engines, index)
    old = {number(engines, index) for index in (0, 1)}
    for index in (0, 1):
        await engines._call_engine(index, "die")
    await until(lambda: engines.registry.new_engines == {0, 1})
    assert not any(task.done() for task in running)
    weight_sync.busy = False
    assert not old & set(await asyncio.gather(*running))


async def test_stopped_engine_process_counts_as_lost(supervised, processes):
    engines, _, _ = supervised
    stopped = engines.actor(1)
    pid = stopped.pid()
    processes.signal(stopped, signal.SIGSTOP)
    engines._config.engine.stuck_timeout_s = 0.5
    await until(lambda: engines.actor(1) is not stopped)
    engines._config.engine.stuck_timeout_s = 300.0
    await until(lambda: engines.routable_engines == [0, 1])
    assert not wait_until_gone([pid], 300)


async def test_an_engine_is_given_more_time_until_it_has_answered_a_request(supervised):
    engines, _, _ = supervised
    engines._config.engine.stuck_timeout_s = 100.0
    old = engines.actor(0)
    assert engines.stuck_limit_s(0) == 500
    while engines.stuck_limit_s(0) > 100:
        await generate(engines, f"{next(Engine.numbers)}/0")
    await engines._call_engine(0, "die")
    await until(lambda: engines.actor(0) is not old)
    assert engines.stuck_limit_s(0) == 500
    engines._config.engine.stuck_timeout_s = 300.0


async def test_engine_that_dies_while_another_starts_is_noticed(supervised, processes):
    engines, _, _ = supervised
    first, spawn = engines.actor(0), engines._spawn_actor
    engines._spawn_actor = lambda index: processes.spawn(holds=True)
    await engines._call_engine(0, "die")
    await until(lambda: engines.actor(0) is not first)
    engines._spawn_actor = spawn
    processes.signal(engines.actor(1), signal.SIGKILL)
    await until(lambda: engines.registry.lost_reasons.keys() == {0, 1})
    await engines._call_engine(0, "release")
    await until(lambda: engines.routable_engines == [0, 1])


@pytest.mark.parametrize("supervised", [False], indirect=True)
async def test_engines_that_cannot_restart_are_abandoned_with_an_error(supervised):
    engines, _, _ = supervised
    for index in (0, 1):
        await engines._call_engine(index, "die")
    with pytest.raises(NoEngineLeftError) as caught:
        async with asyncio.timeout(300):
            await generate(engines, "a/0")
    assert caught.value.reasons.keys() == {0, 1}


async def test_request_that_kills_several_engines_fails(supervised):
    engines, _, _ = supervised
    with pytest.raises(ProcessDiedError):
        await generate(engines, "poison/0")
    await until(lambda: engines.routable_engines == [0, 1])
    assert engines.registry.num_replaced >= 3


async def test_lost_policy_is_logged_once_and_raised_in_waiting_requests(supervised, caplog):
    engines, weight_sync, _ = supervised
    weight_sync.policy_lost = True
    await engines._call_engine(1, "die")
    await until(lambda: engines.registry.new_engines == {1})
    await until_sync_attempts(weight_sync, times=4)
    assert caplog.text.count("engine 1 waits for a new policy") == 1
    assert await generate(engines, "a/0"), "another one serves"
    waiting = asyncio.create_task(generate(engines, "aslow/0"))
    await until_running(engines, 0)
    await engines._call_engine(0, "die")
    with pytest.raises(PolicyRankDiedError) as caught:
        async with asyncio.timeout(300):
            await waiting
    assert "policy rank 1 died" in str(caught.value), "what the supervisor was told"
    await until(lambda: engines.registry.new_engines == {0, 1})
    await until_sync_attempts(weight_sync, times=12)  # often enough to lose an engine too often
    assert engines.registry.num_replaced == 2
    weight_sync.policy_lost = False
    await until(lambda: engines.routable_engines == [0, 1])
    assert await generate(engines, "b/0")


async def test_waiting_requests_fail_when_the_supervisor_itself_fails(supervised, caplog):
    engines, weight_sync, _ = supervised
    weight_sync.busy = True
    for index in (0, 1):
        await engines._call_engine(index, "die")
    await until(lambda: engines.registry.new_engines == {0, 1})
    waiting = asyncio.create_task(generate(engines, "a/0"))
    await asyncio.sleep(0)
    weight_sync.broken = True
    with pytest.raises(NoEngineLeftError) as caught:
        async with asyncio.timeout(300):
            await waiting
    assert not caught.value.reasons, "no engine was abandoned"
    assert "layer 3" in caplog.text


def test_replace_lost_engines_waits_for_the_replacement(supervised, processes):
    engines, weight_sync, supervisor = supervised
    assert not supervisor.replace_lost_engines(0)
    weight_sync.busy = True
    processes.signal(engines.actor(0), signal.SIGKILL)
    assert supervisor.replace_lost_engines(0)
    assert engines.registry.new_engines == {0}
    assert engines.routable_engines == [1]
    assert supervisor.replace_lost_engines(0), "one that was replaced before the call counts"
    assert not supervisor.replace_lost_engines(1)


def test_engine_that_rays_memory_monitor_killed_is_lost(monkeypatch):
    """Its health check raises no `RayActorError`."""

    def get(_):
        raise ray.exceptions.OutOfMemoryError("1 worker(s) were killed")

    monkeypatch.setattr(module.ray, "get", get)
    assert "engine 3 was killed by Ray's memory monitor" in module._death_reason(3, object())

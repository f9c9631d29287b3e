"""What an engine gives up and takes again, with vLLM's calls noted instead of made."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from mega_agentrl.generator.sleep import Held, HeldMemory


class LLM:
    """Notes what it is asked."""

    def __init__(self):
        self.asked = []

    async def sleep(self, level, mode):
        self.asked.append(f"sleep {level} {mode}")

    async def wake_up(self, tags):
        self.asked.append(f"wake {' '.join(tags)}")


async def ask(call):
    return await call


def memory(*, sleeps=True):
    llm = LLM()
    return llm, HeldMemory(llm, ask, sleeps=sleeps)


async def test_an_update_wakes_weights_then_the_cache():
    llm, held = memory()
    assert held.can_compute
    await held.give_up()
    await held.give_up()
    assert held.held is Held.empty
    await held.wake("weights")
    held.filled()
    assert not held.can_compute
    await held.wake("cache")
    await held.wake("weights")
    await held.wake("cache")
    assert llm.asked == ["sleep 2 wait", "wake weights", "wake kv_cache"]
    assert held.can_compute


async def test_weights_that_have_not_come_keep_the_cache_asleep():
    llm, held = memory()
    await held.give_up()
    await held.wake("weights")
    with pytest.raises(RuntimeError, match="proven weight update first"):
        await held.wake("cache")
    await held.give_up()
    assert llm.asked == ["sleep 2 wait", "wake weights", "sleep 2 wait"]
    assert held.held is Held.empty


async def test_on_a_cpu_the_states_are_the_same_and_vllm_is_not_asked():
    llm, held = memory(sleeps=False)
    await held.give_up()
    assert (held.held, held.can_compute) == (Held.empty, False)
    await held.wake("weights")
    held.filled()
    await held.wake("cache")
    assert held.can_compute
    assert llm.asked == []


async def test_an_engine_sleeps_when_nothing_runs_and_does_not_serve_empty(monkeypatch):
    pytest.importorskip("vllm")
    from mega_agentrl.generator.engine import Engine

    llm, engine = LLM(), Engine()
    told = llm.asked

    async def note(name, *args, **kwargs):
        told.append(name)

    vllm_calls = {
        name: lambda *args, name=name, **kwargs: note(name)
        for name in ("pause_generation", "resume_generation")
    }
    for name, call in vllm_calls.items():
        setattr(llm, name, call)
    llm.collective_rpc = lambda method, args=(): note(method)
    llm.errored = False
    engine._llm, engine._memory = llm, HeldMemory(llm, engine._ask, sleeps=True)
    engine._idle.set()
    engine._serving.set()
    running = engine._counted()
    running.__enter__()
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0.01)
    assert told == []
    running.__exit__(None, None, None)
    await sleeping
    assert told == ["pause_generation", "weights_drop", "sleep 2 wait"]
    with pytest.raises(RuntimeError, match="cannot serve: it was to serve in the middle"):
        await engine.resume()
    assert not engine.can_serve


def test_a_worker_does_not_compute_with_what_it_has_given_up():
    pytest.importorskip("vllm")
    from mega_agentrl.generator.transfer import ReshardTransferEngine, State

    worker = SimpleNamespace(_state=State.ready, failure=None)
    ReshardTransferEngine.drop(worker)
    with pytest.raises(RuntimeError, match="state 'dropped'"):
        ReshardTransferEngine.check_proven(worker)
    worker._state = State.failed
    ReshardTransferEngine.drop(worker)
    assert worker._state is State.failed

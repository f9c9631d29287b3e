"""Memory that an engine frees and takes again, with vLLM's calls recorded instead of made."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from mega_agentrl.generator.sleep_mode import MemoryState, SleepController


class LLM:
    """Notes what it is asked."""

    def __init__(self):
        self.calls = []

    async def sleep(self, level, mode):
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")


async def await_vllm(call):
    return await call


def memory(*, has_sleep_mode=True):
    llm = LLM()
    return llm, SleepController(llm, await_vllm, has_sleep_mode=has_sleep_mode)


async def test_an_update_wakes_weights_then_the_cache():
    llm, controller = memory()
    assert controller.can_compute
    await controller.sleep()
    await controller.sleep()
    assert controller.state is MemoryState.asleep
    await controller.wake("weights")
    controller.mark_weights_verified()
    assert not controller.can_compute
    await controller.wake("cache")
    await controller.wake("weights")
    await controller.wake("cache")
    assert llm.calls == ["sleep 2 wait", "wake weights", "wake kv_cache"]
    assert controller.can_compute


async def test_weights_that_have_not_come_keep_the_cache_asleep():
    llm, controller = memory()
    await controller.sleep()
    await controller.wake("weights")
    with pytest.raises(RuntimeError, match="proven weight update first"):
        await controller.wake("cache")
    await controller.sleep()
    assert llm.calls == ["sleep 2 wait", "wake weights", "sleep 2 wait"]
    assert controller.state is MemoryState.asleep


async def test_on_a_cpu_the_states_are_the_same_and_vllm_is_not_asked():
    llm, controller = memory(has_sleep_mode=False)
    await controller.sleep()
    assert (controller.state, controller.can_compute) == (MemoryState.asleep, False)
    await controller.wake("weights")
    controller.mark_weights_verified()
    await controller.wake("cache")
    assert controller.can_compute
    assert llm.calls == []


async def test_an_engine_sleeps_when_nothing_runs_and_does_not_serve_empty(monkeypatch):
    pytest.importorskip("vllm")
    from mega_agentrl.generator.engine import Engine

    llm, engine = LLM(), Engine()
    calls = llm.calls

    async def note(name, *args, **kwargs):
        calls.append(name)

    vllm_calls = {
        name: lambda *args, name=name, **kwargs: note(name)
        for name in ("pause_generation", "resume_generation")
    }
    for name, call in vllm_calls.items():
        setattr(llm, name, call)
    llm.collective_rpc = lambda method, args=(): note(method)
    llm.errored = False
    engine._llm, engine._sleep_controller = (
        llm,
        SleepController(llm, engine._await_vllm, has_sleep_mode=True),
    )
    engine._idle_event.set()
    engine._serving_event.set()
    running = engine._count_running()
    running.__enter__()
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0.01)
    assert calls == []
    running.__exit__(None, None, None)
    await sleeping
    assert calls == ["pause_generation", "weights_release", "sleep 2 wait"]
    with pytest.raises(RuntimeError, match="cannot serve: it was resumed in the middle"):
        await engine.resume()
    assert not engine.can_serve


def test_a_worker_does_not_compute_with_what_it_has_given_up():
    pytest.importorskip("vllm")
    from mega_agentrl.generator.weights.transfer_engine import ReshardTransferEngine, UpdateState

    worker = SimpleNamespace(_state=UpdateState.ready, failure=None)
    ReshardTransferEngine.release_weights(worker)
    with pytest.raises(RuntimeError, match="state 'released'"):
        ReshardTransferEngine.check_weights_verified(worker)
    worker._state = UpdateState.failed
    ReshardTransferEngine.release_weights(worker)
    assert worker._state is UpdateState.failed

"""Memory that an engine frees and allocates again, around a vLLM that records the calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from mega_agentrl.generator.sleep_mode import MemoryState, SleepController
from mega_agentrl.generator.weights.transfer_engine import ReshardTransferEngine, UpdateState
from tests.generator.fake_vllm import FakeVllm


async def await_vllm(call):
    return await call


def make_controller(*, has_sleep_mode=True):
    vllm = FakeVllm()
    return vllm, SleepController(vllm, await_vllm, has_sleep_mode=has_sleep_mode, has_weights=True)


async def test_an_update_wakes_weights_then_the_cache():
    vllm, controller = make_controller()
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
    assert vllm.calls == ["sleep 2 wait", "wake weights", "wake kv_cache"]
    assert controller.can_compute


def test_an_engine_that_has_loaded_no_weights_cannot_compute_before_an_update():
    controller = SleepController(FakeVllm(), await_vllm, has_sleep_mode=False, has_weights=False)
    assert not controller.can_compute
    controller.mark_weights_verified()
    assert controller.can_compute


async def test_the_cache_does_not_wake_before_verified_weights():
    vllm, controller = make_controller()
    await controller.sleep()
    await controller.wake("weights")
    with pytest.raises(RuntimeError):
        await controller.wake("cache")
    await controller.sleep()
    assert vllm.calls == ["sleep 2 wait", "wake weights", "sleep 2 wait"]
    assert controller.state is MemoryState.asleep


async def test_on_a_cpu_the_states_are_the_same_and_vllm_is_not_asked():
    vllm, controller = make_controller(has_sleep_mode=False)
    await controller.sleep()
    assert (controller.state, controller.can_compute) == (MemoryState.asleep, False)
    await controller.wake("weights")
    controller.mark_weights_verified()
    await controller.wake("cache")
    assert controller.can_compute
    assert vllm.calls == []


def test_a_worker_does_not_compute_with_released_weights():
    worker = SimpleNamespace(_state=UpdateState.ready, failure=None)
    ReshardTransferEngine.release_weights(worker)
    with pytest.raises(RuntimeError, match="state 'released'"):
        ReshardTransferEngine.check_weights_verified(worker)
    worker._state = UpdateState.failed
    ReshardTransferEngine.release_weights(worker)
    assert worker._state is UpdateState.failed

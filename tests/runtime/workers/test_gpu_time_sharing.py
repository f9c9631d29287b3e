"""Handover of shared GPUs between policy and engines, with sides that record their calls.

`tests/train/test_trainer.py` covers a whole run on shared GPUs, `test_weight_sync` the transfer.
"""

import threading

import pytest

from mega_agentrl.runtime.workers.gpu_time_sharing import (
    ALL_STATE,
    GpuOwner,
    GpuTimeSharing,
    ModelTurns,
)


class CallFailedError(RuntimeError):
    """A call of a side failed."""


class Side:
    """Records the calls of both sides in one list; calls in `fails` raise."""

    def __init__(self, calls, fails=()):
        self.calls, self.fails = calls, set(fails)

    def record(self, what):
        self.calls.append(what)
        if what in self.fails:
            raise CallFailedError(what)

    def set_gpu_resident(self, parts):
        self.record(f"policy {'+'.join(sorted(parts)) or 'nothing'}")

    def sleep(self):
        self.record("sleep")

    def wake_up(self, part, engines):
        self.record(f"wake {part} {list(engines)}")


def sides(**fails):
    calls = []
    policy = Side(calls, fails.get("policy", ()))
    return calls, GpuTimeSharing(ModelTurns(policy), Side(calls, fails.get("engines", ())))


def load_policy(gpu_time_sharing):
    gpu_time_sharing.acquire_for_models()
    gpu_time_sharing._models.set_gpu_resident(ALL_STATE)


SEND = ["policy weights", "wake weights [0, 1]", "policy nothing", "wake cache [0, 1]"]


def test_gpus_go_to_the_engines_and_back_in_a_training_step():
    calls, gpu_time_sharing = sides()
    assert gpu_time_sharing.owner is GpuOwner.policy
    load_policy(gpu_time_sharing)
    assert calls == []
    gpu_time_sharing.acquire_for_transfer([0, 1])
    gpu_time_sharing.release_to_engines([0, 1])
    assert calls == SEND
    assert gpu_time_sharing.owner is GpuOwner.engines
    load_policy(gpu_time_sharing)
    assert calls[4:] == ["sleep", "policy gradients+optimizer+weights"]


def test_engines_sleep_before_a_transfer_between_rollouts():
    calls, gpu_time_sharing = sides()
    gpu_time_sharing.offload_policy()
    calls.clear()
    gpu_time_sharing.acquire_for_transfer([0, 1])
    gpu_time_sharing.release_to_engines([0, 1])
    assert calls == ["sleep", *SEND]


def test_restarted_transfer_includes_the_replaced_engine():
    calls, gpu_time_sharing = sides()
    gpu_time_sharing.acquire_for_transfer([0, 1])
    gpu_time_sharing.offload_policy()  # an engine was lost: its successor starts
    with gpu_time_sharing.reserve_for_engine_start():
        calls.append("start")
    gpu_time_sharing.acquire_for_transfer([0, 2])
    gpu_time_sharing.release_to_engines([0, 2])
    assert calls[2:4] == ["policy nothing", "start"]
    assert calls[4:7] == ["sleep", "policy weights", "wake weights [0, 2]"]


def test_policy_that_died_in_a_transfer_reclaims_the_gpus():
    calls, gpu_time_sharing = sides(policy=["policy nothing"])
    gpu_time_sharing.acquire_for_transfer([0])
    gpu_time_sharing.acquire_for_models()
    assert calls[-1] == "sleep"
    assert gpu_time_sharing.owner is GpuOwner.policy
    gpu_time_sharing.acquire_for_transfer([0])
    with pytest.raises(CallFailedError):
        gpu_time_sharing.release_to_engines([0])
    # Dead, it has no memory: an engine may start.
    with gpu_time_sharing.reserve_for_engine_start():
        assert gpu_time_sharing.owner is GpuOwner.engines


def test_engines_that_fail_to_sleep_keep_the_gpus():
    calls, gpu_time_sharing = sides(engines=["sleep"])
    gpu_time_sharing.acquire_for_transfer([0])
    gpu_time_sharing.release_to_engines([0])
    with pytest.raises(CallFailedError):
        load_policy(gpu_time_sharing)
    assert gpu_time_sharing.owner is GpuOwner.engines
    assert "policy gradients+optimizer+weights" not in calls


def test_policy_and_engine_start_wait_for_each_other():
    calls, gpu_time_sharing = sides()
    gpu_time_sharing.offload_policy()
    started = threading.Event()
    loading = threading.Thread(target=load_policy, args=(gpu_time_sharing,))
    with gpu_time_sharing.reserve_for_engine_start():
        loading.start()
        started.wait(0.2)
        assert gpu_time_sharing.owner is GpuOwner.engines
        calls.append("started")
    loading.join(300)
    assert gpu_time_sharing.owner is GpuOwner.policy
    assert calls[-2:] == ["started", "policy gradients+optimizer+weights"]

    def start():
        with gpu_time_sharing.reserve_for_engine_start():
            calls.append("started again")

    starting = threading.Thread(target=start)
    starting.start()
    starting.join(0.2)
    assert starting.is_alive()
    gpu_time_sharing.acquire_for_transfer([0])
    gpu_time_sharing.release_to_engines([0])
    starting.join(300)
    assert "started again" in calls[calls.index("policy nothing", 2) :]

"""What workers answer: rank 0 of each tensor-parallel group has the measurements."""

from __future__ import annotations

import gc
import os
import pickle
from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.generator import worker_extension
from mega_agentrl.generator.entropy_tap.tap_store import TapStore
from mega_agentrl.generator.weights.transfer_engine import UpdateFailure
from mega_agentrl.generator.worker_extension import WorkerExtension


class Worker(WorkerExtension):
    def __init__(self, rank, size):
        self.rank = rank
        self.parallel_config = SimpleNamespace(tensor_parallel_size=size)


@pytest.fixture
def store(monkeypatch):
    store = TapStore()
    store.open("a")
    store.record(torch.tensor([[1.5], [0.5], [3.0]]), [("a", 0, 0)])
    monkeypatch.setattr(worker_extension, "TAP_STORE", store)
    return store


def test_rank_0_answers_in_order_and_takes(store):
    worker = Worker(rank=0, size=2)
    assert worker.tap_read(["b", "a"], False) == [((), (), ()), ((1.5,), (0.5,), (3,))]
    assert worker.tap_num_requests() == 1
    worker.tap_read(["a"], True)
    assert worker.tap_num_requests() == 0


def test_a_worker_on_a_cpu_tells_what_its_process_took(monkeypatch):
    worker = Worker(rank=1, size=2)
    worker.device = SimpleNamespace(type="cpu")
    taken = SimpleNamespace(peak_mib=lambda: 12.5, libraries_mib=lambda: 400.0)
    monkeypatch.setattr(worker_extension, "PROCESS_MEMORY", taken)
    assert worker.peak_memory_mib() == {"peak_mib": 12.5, "libraries_mib": 400.0}


def test_other_ranks_answer_none(store):
    assert Worker(rank=1, size=2).tap_read(["a"], True) is None
    assert len(store) == 1


def test_a_started_worker_gives_way_on_a_cpu_only(monkeypatch):
    steps = []
    monkeypatch.setattr(os, "nice", steps.append)
    for device in ("cpu", "cuda"):
        worker = Worker(rank=0, size=1)
        worker.device = SimpleNamespace(type=device)
        worker.finish_startup()
    gc.unfreeze()
    assert steps == [worker_extension.CPU_NICENESS]


class Receiver:
    """Notes what it is called with."""

    def __init__(self):
        self.failure = None
        self.calls = []

    def layout(self):
        raise KeyError("weight")

    def verify(self, version, expected):
        self.calls.append((version, expected))

    def reject(self, reason):
        self.calls.append(reason)

    def guard_execute_model(self, execute_model):
        return lambda scheduled: f"guarded {execute_model(scheduled)}"


@pytest.fixture
def worker():
    worker = Worker(rank=1, size=2)
    worker.weight_transfer_engine = Receiver()
    return worker


def test_a_layout_comes_pickled_with_the_place_of_the_worker(worker):
    worker.weight_transfer_engine.layout = lambda: ["shard"]
    failure, answer = worker.weights_layout()
    assert failure is None
    layout, where = pickle.loads(answer)
    assert (layout, where) == (["shard"], worker_extension.current_device_location())


def test_a_layout_that_fails_is_an_answer_not_an_error(worker):
    assert worker.weights_layout() == ("KeyError: 'weight'", b"")


def test_a_worker_is_given_its_own_digests(worker):
    worker.weights_verify(3, pickle.dumps(["of rank 0", "of rank 1"]))
    assert worker.weight_transfer_engine.calls == [(3, "of rank 1")]


def test_a_failure_says_whether_it_followed_from_a_peer(worker):
    assert worker.weights_failure() is None
    worker.weight_transfer_engine.failure = UpdateFailure("lost rank 4", is_caused_by_peer=True)
    assert worker.weights_failure() == (True, "lost rank 4")


def test_a_rejected_update_is_over_for_vllm_as_well(worker):
    worker._weight_update_active = True
    worker.weights_reject("the probe differs")
    assert worker.weight_transfer_engine.calls == ["the probe differs"]
    assert not worker._weight_update_active


def test_the_model_runner_is_guarded(worker):
    worker.model_runner = SimpleNamespace(execute_model=lambda scheduled: f"ran {scheduled}")
    worker.weights_install_guard()
    assert worker.model_runner.execute_model("step") == "guarded ran step"

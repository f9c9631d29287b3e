"""What workers answer: rank 0 of each tensor-parallel group has the measurements."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest
import torch

from mega_agentrl.generator import worker_extension
from mega_agentrl.generator.entropy_tap import TapStore
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
    monkeypatch.setattr(worker_extension, "STORE", store)
    return store


def test_rank_0_answers_in_order_and_takes(store):
    worker = Worker(rank=0, size=2)
    assert worker.tap_read(["b", "a"], False) == [((), (), ()), ((1.5,), (0.5,), (3,))]
    assert worker.tap_size() == 1
    worker.tap_read(["a"], True)
    assert worker.tap_size() == 0


def test_other_ranks_answer_none(store):
    assert Worker(rank=1, size=2).tap_read(["a"], True) is None
    assert len(store) == 1


def test_a_settled_worker_gives_way_on_a_cpu_only(monkeypatch):
    steps = []
    monkeypatch.setattr(os, "nice", steps.append)
    for device in ("cpu", "cuda"):
        worker = Worker(rank=0, size=1)
        worker.device = SimpleNamespace(type=device)
        worker.settle()
    gc.unfreeze()
    assert steps == [worker_extension.CPU_NICENESS]

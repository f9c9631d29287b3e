"""Methods of workers that a live engine of one worker on a CPU does not show."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from mega_agentrl.generator import worker_extension
from mega_agentrl.generator.entropy_tap import TappedSamplerV2
from mega_agentrl.generator.worker_extension import WorkerExtension


class Worker(WorkerExtension):
    def __init__(self, rank, size):
        self.rank = rank
        self.parallel_config = SimpleNamespace(tensor_parallel_size=size)

    def load_model(self, *, load_dummy_weights):
        assert load_dummy_weights
        self.model_runner = SimpleNamespace(sampler=SimpleNamespace(vocab_size=9))


def test_the_sampler_is_tapped_when_the_model_is_loaded():
    """Before vLLM profiles memory and warms kernels up, for which it calls the sampler."""
    worker = Worker(rank=0, size=1)
    worker.load_model(load_dummy_weights=True)
    assert isinstance(worker.model_runner.sampler, TappedSamplerV2)
    assert worker.model_runner.sampler.vocab_size == 9


def test_a_worker_on_a_cpu_reports_the_memory_of_its_process(monkeypatch):
    worker = Worker(rank=1, size=2)
    worker.device = SimpleNamespace(type="cpu")
    memory = SimpleNamespace(peak_mib=lambda: 12.5, libraries_mib=lambda: 400.0)
    monkeypatch.setattr(worker_extension, "PROCESS_MEMORY", memory)
    assert worker.peak_memory_mib() == {"peak_mib": 12.5, "libraries_mib": 400.0}


def test_a_started_worker_lowers_its_priority_on_a_cpu_only(monkeypatch):
    steps = []
    monkeypatch.setattr(os, "nice", steps.append)
    for device in ("cpu", "cuda"):
        worker = Worker(rank=0, size=1)
        worker.device = SimpleNamespace(type=device)
        worker.finish_startup()
    gc.unfreeze()
    assert steps == [worker_extension.CPU_NICENESS]


@pytest.fixture
def worker():
    worker = Worker(rank=1, size=2)
    worker.weight_transfer_engine = SimpleNamespace()
    return worker


def test_a_layout_that_fails_is_an_answer_not_an_error(worker):
    def layout():
        raise KeyError("weight")

    worker.weight_transfer_engine.layout = layout
    assert worker.weights_layout() == ("KeyError: 'weight'", b"")


def test_the_model_runner_is_guarded(worker):
    def guard(execute_model):
        return lambda scheduled: f"guarded {execute_model(scheduled)}"

    worker.weight_transfer_engine.guard_execute_model = guard
    worker.model_runner = SimpleNamespace(execute_model=lambda scheduled: f"ran {scheduled}")
    worker.weights_install_guard()
    assert worker.model_runner.execute_model("step") == "guarded ran step"

"""Variables for each kind of engine; nothing is set that vLLM would misread."""

from __future__ import annotations

import json
import os

import pytest

from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator.environment import HOST_PID_VARIABLE, set_vllm_environment


@pytest.fixture(autouse=True)
def _restored():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("cpus", "tensor", "expected"),
    [
        ({0, 1}, 2, "0|1"),
        ({0, 1}, 4, "0|1|0|1"),
        ({2, 3, 4, 5}, 2, "2,3|4,5"),
        ({0, 1, 2, 3}, 1, "nobind"),
    ],
)
def test_workers_are_bound_to_their_share(monkeypatch, cpus, tensor, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    set_vllm_environment(EngineConfig(tensor_parallel_size=tensor, cpu_kv_cache_gib=3))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == expected
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert os.environ[HOST_PID_VARIABLE] == str(os.getpid())


def test_a_gpu_gets_no_cpu_variables(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    set_vllm_environment(EngineConfig(enforce_eager=False), on_gpu=True)
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_log_lines_go_to_the_file(tmp_path):
    log_path = tmp_path / "logs" / "engine0.log"
    set_vllm_environment(EngineConfig(), log_path=log_path)
    with open(os.environ["VLLM_LOGGING_CONFIG_PATH"]) as file:
        settings = json.load(file)
    assert settings["handlers"]["file"]["filename"] == str(log_path)


def test_shared_gpus_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    set_vllm_environment(EngineConfig(), on_gpu=True, gpus="")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    set_vllm_environment(EngineConfig(), on_gpu=True, gpus="2,3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"

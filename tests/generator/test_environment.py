"""Variables for each kind of engine; nothing is set that vLLM would misread."""

from __future__ import annotations

import json
import os

import pytest

from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator.environment import (
    EXACT_MODEL_VARIABLE,
    HOST_PID_VARIABLE,
    set_vllm_environment,
)


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
    ids=["one-each", "more-workers-than-cores", "two-each", "one-worker"],
)
def test_workers_are_bound_to_their_share(monkeypatch, cpus, tensor, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    set_vllm_environment(EngineConfig(tensor_parallel_size=tensor, cpu_kv_cache_gib=3))
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == expected
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert os.environ[HOST_PID_VARIABLE] == str(os.getpid())


@pytest.mark.parametrize(("has_all_cores", "threads"), [(True, "4"), (False, "2")])
def test_one_worker_has_all_cores_if_nothing_else_computes(monkeypatch, has_all_cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    set_vllm_environment(EngineConfig(), has_all_cores=has_all_cores)
    assert os.environ["OMP_NUM_THREADS"] == threads


def test_a_gpu_gets_no_cpu_variables_and_the_gpus_it_shares(monkeypatch):
    for name in ("VLLM_CPU_KVCACHE_SPACE", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    set_vllm_environment(EngineConfig(), on_gpu=True, gpus="")
    assert not {"VLLM_CPU_KVCACHE_SPACE", "TORCH_COMPILE_DISABLE"} & os.environ.keys()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    set_vllm_environment(EngineConfig(), on_gpu=True, gpus="2,3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_kernels_are_compiled_for_graphs_alone():
    for is_eager, on_gpu in ((True, True), (True, False), (False, False)):
        os.environ.pop("TORCH_COMPILE_DISABLE", None)
        set_vllm_environment(EngineConfig(enforce_eager=is_eager), on_gpu=on_gpu)
        assert os.environ["TORCH_COMPILE_DISABLE"] == "1"


def test_vllm_waits_for_starts_and_steps_as_long_as_the_run_does(monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "7")
    set_vllm_environment(EngineConfig(stuck_timeout_s=100.5), ready_timeout_s=3600.2)
    assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "3601"
    assert os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "503"


def test_only_an_exact_engine_gets_the_folder_of_its_model(monkeypatch):
    monkeypatch.delenv(EXACT_MODEL_VARIABLE, raising=False)
    set_vllm_environment(EngineConfig())
    assert EXACT_MODEL_VARIABLE not in os.environ
    set_vllm_environment(EngineConfig(), exact_model="folder")
    assert os.environ[EXACT_MODEL_VARIABLE] == "folder"


def test_log_lines_go_to_the_file(tmp_path):
    log_path = tmp_path / "logs" / "engine0.log"
    set_vllm_environment(EngineConfig(), log_path=log_path)
    with open(os.environ["VLLM_LOGGING_CONFIG_PATH"]) as file:
        settings = json.load(file)
    assert settings["handlers"]["file"]["filename"] == str(log_path)

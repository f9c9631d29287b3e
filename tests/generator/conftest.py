"""One engine for all tests of the generator: starting one takes half a minute."""

from __future__ import annotations

from unittest import mock

import pytest

from mega_agentrl.config.sections.runtime import EngineConfig
from tests.generator.engine_host import EngineHost
from tests.generator.tiny_model import write_model


@pytest.fixture(scope="session")
def inspect_models_in_process():
    """Let vLLM read the properties of a class of models in this process.

    Where its cache lacks them it would start a process for each class, which spends ten CPU seconds
    on imports, because inspecting a class must not initialize CUDA in the caller.
    """
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), scale=4.0)


@pytest.fixture(scope="session")
def engine(model_folder, tmp_path_factory):
    config = EngineConfig(max_model_len=512, cpu_kv_cache_gib=1)
    host = EngineHost(config, model_folder, tmp_path_factory.mktemp("engine") / "vllm.log")
    yield host
    host.close()

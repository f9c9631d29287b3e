"""One small Ray and one small configuration for all tests of the runtime."""

import logging

import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.config.sections.tools import SearchToolConfig, ToolConfig
from mega_agentrl.runtime.cluster import set_ray_environment


@pytest.fixture(scope="session")
def ray_local():
    set_ray_environment()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=128 * 1024**2,
    )
    yield
    ray.shutdown()


@pytest.fixture
def config(assets, tmp_path):
    """A run on the small tool-QA, without a warm start."""
    return TrainConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(path=f"{assets}/model"),
        data=DataConfig(train=f"{assets}/train.parquet", validation=f"{assets}/validation.parquet"),
        tool=ToolConfig(search=SearchToolConfig(source=f"{assets}/corpus.jsonl")),
    )

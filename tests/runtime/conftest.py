"""One small configuration for all tests of the runtime."""

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.config.sections.tools import SearchToolConfig, ToolConfig


@pytest.fixture
def config(assets, tmp_path):
    """A run on the small tool-QA, without a warm start."""
    return TrainConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(path=f"{assets}/model"),
        data=DataConfig(train=f"{assets}/train.parquet", validation=f"{assets}/validation.parquet"),
        tool=ToolConfig(search=SearchToolConfig(source=f"{assets}/corpus.jsonl")),
    )

"""One small configuration for all tests of the runtime."""

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import ModelConfig, SftConfig
from mega_agentrl.config.sections.tools import SearchToolConfig, ToolConfig
from mega_agentrl.runtime.inputs import read_inputs


def toolqa_config(assets, run_dir):
    """A run on the small tool-QA, without a warm start."""
    return TrainConfig(
        run_dir=str(run_dir),
        model=ModelConfig(path=f"{assets}/model"),
        data=DataConfig(train=f"{assets}/train.parquet", validation=f"{assets}/validation.parquet"),
        tool=ToolConfig(search=SearchToolConfig(source=f"{assets}/corpus.jsonl")),
    )


@pytest.fixture
def config(assets, tmp_path):
    return toolqa_config(assets, tmp_path)


@pytest.fixture(scope="session")
def warm_start(assets):
    """Settings of a warm start."""
    return SftConfig(
        max_steps=1,
        train_data=f"{assets}/demonstrations.parquet",
        dev_data=f"{assets}/dev.parquet",
    )


@pytest.fixture(scope="session")
def inputs(assets, warm_start, tmp_path_factory):
    """The inputs of a run with a warm start; its tools are not started."""
    config = toolqa_config(assets, tmp_path_factory.mktemp("run"))
    config.sft = warm_start
    return read_inputs(config)

"""The folder of the order game fits its experiment."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.generated.settings import GeneratedTask
from mega_agentrl.data.orders.orders import ATTRIBUTES
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.rollout.branching.policy import MIN_PROBE_TOKENS
from mega_agentrl.rollout.interaction.session import load_interaction_registry


@pytest.fixture(scope="module")
def folder(task_folder):
    return task_folder(GeneratedTask.orders)


@pytest.fixture(scope="module")
def codec(folder):
    return HFCodec(folder / "model")


@pytest.fixture(scope="module")
def limits():
    return OmegaConf.load(find_config_dir() / "experiment" / "smoke_orders.yaml")


def test_prompts_fit_the_experiment_and_name_a_customer(folder, codec, limits):
    registry = load_interaction_registry(str(folder / "interaction.yaml"), ())
    file = DataFile(str(folder / "train.parquet"))
    config = DataConfig(max_prompt_tokens=limits.data.max_prompt_tokens)
    prompts = load_prompts([file], codec, config, key="data.train", tool_schemas={}).prompts
    assert len(prompts) == 90
    registry.check_prompt_kwargs(prompts)
    assert all(registry.open_session(prompt).name == "customer" for prompt in prompts)
    assert set(limits.reward.rubric.default) == set(registry.names)


def test_every_turn_is_long_enough_to_fork(codec):
    for text in ("Welcome. What may I order?", "<think> any </think> ask city"):
        assert len(codec.encode(text)) >= MIN_PROBE_TOKENS


def test_a_value_has_the_same_tokens_in_answer_and_order(codec):
    for name in ATTRIBUTES:
        answer = codec.encode(f"{name}=Tirok")
        assert len(answer) == 3
        assert codec.encode(f"order {name}=Tirok")[-3:] == answer

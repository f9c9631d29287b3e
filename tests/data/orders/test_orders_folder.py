"""The folder of the order game fits its experiment."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.generated.settings import GeneratedTask, TaskSettings, is_written
from mega_agentrl.data.orders.dataset_writer import write_orders_dataset
from mega_agentrl.data.orders.demonstrations import VOCABULARY
from mega_agentrl.data.orders.orders import ATTRIBUTES
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.data.sft_dataset import encode_demonstrations, read_conversations
from mega_agentrl.rollout.branching.policy import MIN_PROBE_TOKENS
from mega_agentrl.rollout.interaction.session import load_interaction_registry

SETTINGS = TaskSettings(
    task=GeneratedTask.orders, num_train=90, num_dev=30, num_validation=30, num_demonstrations=200
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders")
    write_orders_dataset(path, SETTINGS)
    return path


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


def test_demonstrations_fit_the_experiment(folder, codec, limits):
    conversations = read_conversations(folder / "demonstrations.parquet")
    made = encode_demonstrations(conversations, codec, max_tokens=limits.engine.max_model_len)
    assert len(made) == 200
    assert max(len(item.response_ids) for item in made) <= limits.rollout.max_response_tokens
    assert all(item.response_ids[-1] == codec.eos_id for item in made)


def test_every_turn_is_long_enough_to_fork(codec):
    for text in ("Welcome. What may I order?", "<think> any </think> ask city"):
        assert len(codec.encode(text)) >= MIN_PROBE_TOKENS


def test_a_value_has_the_same_tokens_in_answer_and_order(codec):
    for name in ATTRIBUTES:
        answer = codec.encode(f"{name}=Tirok")
        assert len(answer) == 3
        assert codec.encode(f"order {name}=Tirok")[-3:] == answer


def test_fixed_parts_are_single_tokens_that_survive_decoding(codec):
    for text in VOCABULARY.tokens:
        (token_id,) = codec.encode(text)
        assert codec.decode([token_id]) == text


def test_rewriting_gives_the_same_bytes(folder, tmp_path):
    assert is_written(folder, SETTINGS)
    write_orders_dataset(tmp_path, SETTINGS)
    for name in SETTINGS.task.output_files:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name

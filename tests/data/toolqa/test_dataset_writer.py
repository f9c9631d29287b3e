"""The folder that is written: prompts, demonstrations, disjoint splits, a model."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.rl_dataset import load_prompts
from mega_agentrl.data.sft_dataset import encode_demonstrations, read_conversations
from mega_agentrl.data.toolqa.dataset_writer import write_model, write_toolqa_dataset
from mega_agentrl.data.toolqa.settings import OUTPUT_FILES, ToolQASettings, is_written
from mega_agentrl.data.toolqa.tokenizer import train_tokenizer

SETTINGS = ToolQASettings(num_train=90, num_dev=30, num_validation=30, num_demonstrations=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toolqa")
    write_toolqa_dataset(path, SETTINGS)
    return path


def prompts(folder, split):
    codec = HFCodec(folder / "model")
    return load_prompts(
        [DataFile(str(folder / f"{split}.parquet"))],
        codec,
        DataConfig(max_prompt_tokens=32),
        key=f"data.{split}",
    ).prompts


def test_the_splits_have_their_sizes_and_share_no_question(folder):
    texts = [
        {prompt.messages[0]["content"] for prompt in prompts(folder, split)}
        for split in ("train", "dev", "validation")
    ]
    assert list(map(len, texts)) == [90, 30, 30]
    assert len(set.union(*texts)) == 150


def test_prompts_offer_both_tools_and_carry_their_split(folder):
    for prompt in prompts(folder, "validation"):
        assert prompt.tools_kwargs == {"python": {}, "search": {}}
        assert prompt.extra_info["split"] == "validation"
        assert prompt.data_source in ("toolqa_python", "toolqa_search", "toolqa_both")


def test_demonstrations_are_short_and_end_in_eos(folder):
    codec = HFCodec(folder / "model")
    demonstrations = encode_demonstrations(
        read_conversations(folder / "demonstrations.parquet"), codec, max_tokens=96
    )
    assert len(demonstrations) == 200
    assert all(item.response_ids[-1] == codec.eos_id for item in demonstrations)
    assert any(0 in item.loss_mask for item in demonstrations)


def test_the_stamp_is_set_and_rewriting_gives_the_same_bytes(folder, tmp_path):
    assert is_written(folder, SETTINGS)
    write_toolqa_dataset(tmp_path, SETTINGS)
    for name in OUTPUT_FILES:
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes(), name


DIALOGUES = [[{"role": "user", "content": "What is 1*2?"}]] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DIALOGUES, vocab_size=400)


def test_the_folder_loads_and_starts_near_the_uniform_distribution(tmp_path, tokenizer):
    write_model(tmp_path, tokenizer, num_layers=2, hidden_size=128, seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("What is 1*2?")])
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert abs(loss - math.log(len(tokenizer))) < 1.5
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert 300_000 < model.num_parameters() < 5_000_000


def test_the_weights_depend_on_the_seed_alone(tmp_path, tokenizer):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(3)
        write_model(tmp_path / name, tokenizer, num_layers=1, hidden_size=64, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_width_that_gives_no_even_number_of_heads_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="hidden_size=96"):
        write_model(tmp_path, tokenizer, num_layers=1, hidden_size=96, seed=0)

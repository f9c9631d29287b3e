"""The tiny model that is written with a task."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from mega_agentrl.data.generated.task_folder import write_model
from mega_agentrl.data.generated.tokenizer import train_tokenizer
from mega_agentrl.data.toolqa.demonstrations import VOCABULARY
from mega_agentrl.errors import InputError

DIALOGUES = [[{"role": "user", "content": "What is 1*2?"}]] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DIALOGUES, VOCABULARY, vocab_size=400)


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
    with pytest.raises(InputError) as caught:
        write_model(tmp_path, tokenizer, num_layers=1, hidden_size=96, seed=0)
    assert (caught.value.name, caught.value.got) == ("hidden_size", 96)

from __future__ import annotations

import json

import pytest

from mega_agentrl.reshard.model_shape import ModelShape

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}


def folder_with(tmp_path, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_reads_the_sizes_of_a_checkpoint(tmp_path):
    shape = ModelShape.from_folder(folder_with(tmp_path))
    assert (shape.num_layers, shape.hidden, shape.ffn, shape.vocab) == (2, 128, 256, 300)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 32)
    assert shape.rope_base == 1e6
    assert shape.tied


def test_reads_the_older_place_of_the_rope_base_and_derives_the_head_width(tmp_path):
    shape = ModelShape.from_folder(
        folder_with(tmp_path, rope_parameters=None, rope_theta=5000.0, head_dim=None)
    )
    assert (shape.rope_base, shape.head_dim) == (5000.0, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*supported: Qwen3ForCausalLM"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_refuses_what_it_cannot_map(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_folder(folder_with(tmp_path, **changes))


def test_a_missing_folder_and_a_folder_without_config_say_which(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        ModelShape.from_folder(tmp_path / "absent")
    with pytest.raises(ValueError, match="it has none"):
        ModelShape.from_folder(tmp_path)

"""What `config.json` says, and configs that are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape, MoeShape
from mega_agentrl.reshard.mapping.rope_config import RopeConfig

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
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def read(tmp_path, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelShape.from_folder(tmp_path)


def test_the_sizes_of_a_checkpoint_are_read(tmp_path):
    assert read(tmp_path) == ModelShape(
        architecture="Qwen3ForCausalLM",
        num_layers=2,
        hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_hidden_size=256,
        vocab_size=300,
        norm_eps=1e-6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    )


def biases(shape):
    return shape.qkv_bias, shape.o_proj_bias, shape.mlp_bias, shape.qk_norm


@pytest.mark.parametrize(
    ("family", "default", "with_biases"),
    [
        ("Llama", (False, False, False, False), (True, True, True, False)),
        ("Qwen2", (True, False, False, False), (True, False, False, False)),
        ("Qwen3", (False, False, False, True), (True, True, False, True)),
        ("Qwen3Moe", (False, False, False, True), (True, True, False, True)),
    ],
    ids=["Llama", "Qwen2", "Qwen3", "Qwen3Moe"],
)
def test_every_family_has_its_biases_and_norms(tmp_path, family, default, with_biases):
    changes = MOE | {"architectures": [f"{family}ForCausalLM"]}
    assert biases(read(tmp_path, **changes)) == default
    assert biases(read(tmp_path, **changes, attention_bias=True, mlp_bias=True)) == with_biases


def test_experts_and_the_layers_that_have_them_are_read(tmp_path):
    shape = read(tmp_path, **MOE)
    assert shape.moe == MoeShape(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=48,
        norm_topk_prob=True,
        moe_layer_pattern=(True, True),
    )
    newer = {key: value for key, value in MOE.items() if key != "num_experts"}
    assert read(tmp_path, **newer, num_local_experts=8) == shape
    mixed = read(tmp_path, **MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert mixed.moe is not None
    assert mixed.moe.moe_layer_pattern == (False, True, False, False, False, True)
    assert [mixed.is_moe_layer(layer) for layer in (0, 1)] == [False, True]
    assert read(tmp_path, **MOE, mlp_only_layers=[0, 1]).moe is None
    assert not read(tmp_path).is_moe_layer(0)


def test_defaults_are_those_of_transformers(tmp_path):
    assert read(tmp_path, head_dim=None).head_dim == 128  # Qwen3's own default
    llama = {"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_key_value_heads": None}
    shape = read(tmp_path, **llama, rope_parameters=None, rope_theta=5000.0)
    assert (shape.head_dim, shape.num_kv_heads, shape.rope.theta) == (32, 4, 5000.0)


def test_a_sliding_window_is_refused_if_a_layer_uses_it(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 16}
    assert read(tmp_path, **window, max_window_layers=2).num_layers == 2
    assert read(tmp_path, layer_types=["full_attention"] * 2).num_layers == 2
    with pytest.raises(InputError) as caught:
        read(tmp_path, **window, max_window_layers=1)
    assert caught.value.name.endswith(", a sliding window in use")
    with pytest.raises(InputError) as caught:
        read(tmp_path, **MOE, **window, max_window_layers=2)
    assert caught.value.name.endswith(", a sliding window in use")


@pytest.mark.parametrize(
    ("changes", "name", "got"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture", "GPT2LMHeadModel"),
        (
            {"architectures": ["Qwen3MoeForSequenceClassification"]},
            "architecture",
            "Qwen3MoeForSequenceClassification",
        ),
        ({"vocab_size": None}, "vocab_size", None),
        ({"num_key_value_heads": None}, "num_key_value_heads", None),
        (MOE | {"num_experts": None}, "num_experts", None),
        (MOE | {"num_experts_per_tok": None}, "num_experts_per_tok", None),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "a sliding window in use", True),
        ({"attention_dropout": 0.1}, "attention_dropout", 0.1),
        ({"is_causal": False}, "is_causal", False),
        ({"quantization_config": {"bits": 4}}, "quantization_config", {"bits": 4}),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type", "longrope"),
        ({"num_key_value_heads": 3}, "num_attention_heads", 4),
    ],
    ids=[
        *("architecture", "moe-classifier", "no-vocab", "no-kv-heads", "no-experts", "no-top-k"),
        *("activation", "window", "dropout", "not-causal", "quantized", "rope", "heads"),
    ],
)
def test_a_config_without_a_mapping_is_refused(tmp_path, changes, name, got):
    with pytest.raises(InputError) as caught:
        read(tmp_path, **changes)
    assert caught.value.name.endswith(name)
    assert caught.value.got == got


def test_a_classifier_must_have_one_label(tmp_path):
    classifier = {"architectures": ["Qwen3ForSequenceClassification"]}
    one = read(tmp_path, **classifier, id2label={"0": "reward"})
    assert (one.head, one.tie_word_embeddings) == (HeadKind.scalar, False)
    assert read(tmp_path, **classifier, num_labels=1).head is HeadKind.scalar
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}):
        with pytest.raises(InputError) as caught:
            read(tmp_path, **classifier, **labels)
        assert caught.value.name.endswith(", num_labels")


def test_a_missing_folder_and_a_folder_without_config_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_folder(tmp_path / "absent")
    assert (caught.value.key, caught.value.got) == ("model.path", tmp_path / "absent")
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_folder(tmp_path)
    assert (caught.value.key, caught.value.got) == ("model.path", tmp_path)


def test_a_scalar_head_replaces_logits_on_the_same_body(tmp_path):
    policy = read(tmp_path)
    critic = policy.with_scalar_head()
    assert critic == replace(
        policy,
        architecture="Qwen3ForSequenceClassification",
        head=HeadKind.scalar,
        tie_word_embeddings=False,
    )
    assert critic.with_scalar_head() == critic
    assert read(tmp_path, architectures=[critic.architecture], num_labels=1) == critic

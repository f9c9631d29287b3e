"""What `config.json` says, for every architecture as transformers writes it and by hand."""

from __future__ import annotations

import json

import pytest

from mega_agentrl.reshard.mapping.model_shape import (
    SCALAR_ARCHITECTURES,
    SUPPORTED_ARCHITECTURES,
    HeadKind,
    ModelShape,
    MoeShape,
)
from mega_agentrl.reshard.mapping.rope_config import RopeType
from tests.tiny_models import POLICIES, REWARDS, make_tiny_model

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


def folder_with(tmp_path, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def read(tmp_path, **changes):
    return ModelShape.from_folder(folder_with(tmp_path, **changes))


def test_reads_the_sizes_of_a_checkpoint(tmp_path):
    shape = read(tmp_path)
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size) == (
        2,
        128,
        256,
        300,
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 32)
    assert (shape.max_position_embeddings, shape.norm_eps) == (512, 1e-6)
    assert (shape.rope.theta, shape.rope.rope_type) == (1e6, RopeType.default)
    assert shape.tie_word_embeddings
    assert (shape.moe, shape.head) == (None, HeadKind.vocab)


def biases(shape):
    return shape.qkv_bias, shape.o_proj_bias, shape.mlp_bias, shape.qk_norm


@pytest.mark.parametrize(
    ("name", "plain", "asked"),
    [
        ("LlamaForCausalLM", (False, False, False, False), (True, True, True, False)),
        ("Qwen2ForCausalLM", (True, False, False, False), (True, False, False, False)),
        ("Qwen3ForCausalLM", (False, False, False, True), (True, True, False, True)),
        ("Qwen3MoeForCausalLM", (False, False, False, True), (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_every_family(tmp_path, name, plain, asked):
    changes = MOE | {"architectures": [name]}
    assert biases(read(tmp_path, **changes)) == plain
    assert biases(read(tmp_path, **changes, attention_bias=True, mlp_bias=True)) == asked


@pytest.mark.parametrize("name", [*POLICIES, *REWARDS])
def test_a_checkpoint_of_transformers(tmp_path, name):
    shape = ModelShape.from_folder(make_tiny_model(name, tmp_path, num_hidden_layers=2, tied=True))
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.ffn_hidden_size) == (
        2,
        32,
        61,
        48,
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert shape.tie_word_embeddings == (name in POLICIES)
    assert shape.head == ("scalar" if name in REWARDS else "vocab")
    assert (shape.moe is not None) == (name == "qwen3_moe")
    kind = {"llama": "llama3", "qwen2": "yarn"}.get(name.split("_")[0], "default")
    assert shape.rope.rope_type == kind


def test_the_families_have_policies_and_reward_models():
    assert len(SUPPORTED_ARCHITECTURES) == 4
    assert SCALAR_ARCHITECTURES == tuple(
        f"{name}ForSequenceClassification" for name in ("Llama", "Qwen2", "Qwen3")
    )


def test_experts_and_which_layers_have_them(tmp_path):
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


def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path):
    assert read(tmp_path, head_dim=None).head_dim == 128  # Qwen3's own default
    llama = {"architectures": ["LlamaForCausalLM"], "head_dim": None, "num_key_value_heads": None}
    shape = read(tmp_path, **llama, rope_parameters=None, rope_theta=5000.0)
    assert (shape.head_dim, shape.num_kv_heads, shape.rope.theta) == (32, 4, 5000.0)


def test_a_sliding_window_that_no_layer_uses_is_no_obstacle(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 16}
    assert read(tmp_path, **window, max_window_layers=2).num_layers == 2
    assert read(tmp_path, layer_types=["full_attention"] * 2).num_layers == 2
    with pytest.raises(ValueError, match="a sliding window in use"):
        read(tmp_path, **window, max_window_layers=1)
    with pytest.raises(ValueError, match="a sliding window in use"):
        read(tmp_path, **MOE, **window, max_window_layers=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', expected 'silu'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4: expected a multiple"),
        (MOE | {"num_experts": None}, "num_experts is missing"),
        (MOE | {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "is not supported"),
    ],
)
def test_refuses_what_it_cannot_map(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **changes)


def test_a_classifier_must_have_one_label(tmp_path):
    classifier = {"architectures": ["Qwen3ForSequenceClassification"]}
    one = read(tmp_path, **classifier, id2label={"0": "reward"})
    assert (one.head, one.tie_word_embeddings) == (HeadKind.scalar, False)
    assert read(tmp_path, **classifier, num_labels=1).head is HeadKind.scalar
    for labels in ({}, {"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}):
        with pytest.raises(ValueError, match=r"num_labels=\d, expected 1"):
            read(tmp_path, **classifier, **labels)


def test_a_missing_folder_and_a_folder_without_config_say_which(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        ModelShape.from_folder(tmp_path / "absent")
    with pytest.raises(ValueError, match="it has none"):
        ModelShape.from_folder(tmp_path)


def test_a_scalar_head_replaces_logits_on_the_same_body(tmp_path):
    policy = read(tmp_path)
    critic = policy.with_scalar_head()
    assert (critic.architecture, critic.head) == (
        "Qwen3ForSequenceClassification",
        HeadKind.scalar,
    )
    assert not critic.tie_word_embeddings
    differing = {"architecture", "head", "tie_word_embeddings"}
    assert all(
        getattr(critic, name) == getattr(policy, name)
        for name in ModelShape.__slots__
        if name not in differing
    )
    assert critic.with_scalar_head() == critic
    reward = read(tmp_path, architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    assert reward == critic

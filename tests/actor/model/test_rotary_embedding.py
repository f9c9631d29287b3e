"""Frequencies equal transformers' bit by bit; angles by position; Megatron's factor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import _yarn_get_concentration_factor_from_config
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from mega_agentrl.actor.model.rotary_embedding import (
    PackedMultimodalRotaryEmbedding,
    PackedRotaryEmbedding,
    compute_frequency_axes,
    set_attention_factor,
)
from mega_agentrl.numerics.rotary_frequencies import compute_inv_freq
from mega_agentrl.reshard.mapping.rope_config import RopeConfig
from tests.tiny_models import LLAMA3_ROPE, YARN_ROPE
from tests.tree_batches import tree_params

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large_base": {"rope_type": "default", "rope_theta": 5e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": LLAMA3_ROPE,
    "llama3_1": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN_ROPE,
    "yarn_not_rounded": YARN_ROPE | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn_mscale": YARN_ROPE | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_given_factor": YARN_ROPE | {"attention_factor": 0.5},
    "yarn_qwen": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}


def both(name, head_dim):
    """Return the `RopeConfig` and transformers' config of the same rope."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(ROPES[name]),
    )
    settings = {"max_position_embeddings": 131072, "rope_parameters": ROPES[name]}
    return RopeConfig.from_config(settings, "config.json"), config


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_factor_are_those_of_transformers(name, head_dim):
    rope, config = both(name, head_dim)
    theirs = LlamaRotaryEmbedding(config)
    assert torch.equal(compute_inv_freq(head_dim, rope), theirs.inv_freq)
    assert rope.attention_factor == theirs.attention_scaling


def test_casting_the_model_leaves_the_frequencies():
    rotary = PackedRotaryEmbedding(16, RopeConfig(theta=10000.0)).bfloat16()
    assert torch.equal(rotary.inv_freq, compute_inv_freq(16, RopeConfig(theta=10000.0)))


@pytest.mark.parametrize("name", ["default", "yarn", "yarn_mscale", "yarn_given_factor"])
def test_megatron_rotates_queries_as_transformers_does(name):
    rope, config = both(name, 16)
    megatron = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    set_attention_factor(megatron, rope)
    position_S = torch.tensor([0, 1, 2, 0, 1, 90])
    query = torch.randn(6, 1, 4, 16, generator=torch.Generator().manual_seed(0))
    got = apply_rotary_pos_emb(
        query,
        PackedRotaryEmbedding(16, rope)(position_S),
        config=megatron,
        mscale=_yarn_get_concentration_factor_from_config(megatron),
        cp_group=object(),
    )
    head_first = query.permute(1, 2, 0, 3)
    cos, sin = LlamaRotaryEmbedding(config)(head_first, position_S[None])
    expected, _ = modeling_llama.apply_rotary_pos_emb(head_first, head_first, cos, sin)
    torch.testing.assert_close(got, expected.permute(2, 0, 1, 3), rtol=1e-6, atol=1e-6)


def mrope(interleaved):
    return RopeConfig(theta=100.0, mrope_section=(2, 3, 3), mrope_interleaved=interleaved)


def test_frequencies_turn_by_the_axis_of_their_section():
    assert compute_frequency_axes(mrope(False)).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    # Height and width take every third frequency as far as their sections go, time the others.
    assert compute_frequency_axes(mrope(True)).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    published = RopeConfig(theta=100.0, mrope_section=(24, 20, 20), mrope_interleaved=True)
    axes = compute_frequency_axes(published)
    assert axes[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert axes[60:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_equal_positions_are_those_of_a_text_model(interleaved):
    position_S = torch.tensor([0, 1, 2, 7])
    multimodal = PackedMultimodalRotaryEmbedding(16, mrope(interleaved))
    plain = PackedRotaryEmbedding(16, RopeConfig(theta=100.0))
    assert torch.equal(multimodal(position_S.expand(3, -1)), plain(position_S))


@pytest.mark.parametrize(
    ("config", "rotary"),
    [
        ("Qwen2_5_VLTextConfig", modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding),
        ("Qwen3VLTextConfig", modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding),
    ],
    ids=["qwen2_5_vl", "qwen3_vl"],
)
@pytest.mark.parametrize("section", [(2, 3, 3), (4, 2, 2)], ids=["2 3 3", "4 2 2"])
def test_angles_along_three_axes_are_those_of_transformers(config, rotary, section):
    is_qwen3 = config.startswith("Qwen3")
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(section)}
    if is_qwen3:
        rope["mrope_interleaved"] = True
    settings = getattr(transformers, config)(
        hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope
    )
    position_3S = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    cos, sin = rotary(settings)(torch.zeros(1), position_3S[:, None])
    own = RopeConfig(theta=100.0, mrope_section=section, mrope_interleaved=is_qwen3)
    angle = PackedMultimodalRotaryEmbedding(16, own)(position_3S).squeeze()
    torch.testing.assert_close(angle.cos(), cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(angle.sin(), sin[0], rtol=0, atol=1e-6)


def test_megatron_receives_the_positions_as_the_sequence_length():
    rotary = PackedRotaryEmbedding(4, RopeConfig(theta=100.0))
    trees = tree_params((0, 2, 5))
    assert trees.position_S.tolist() == [0, 1, 0, 1, 2]
    assert rotary.get_rotary_seq_len(None, None, None, None, trees) is trees.position_S

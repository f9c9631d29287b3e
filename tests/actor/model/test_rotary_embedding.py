"""Frequencies equal transformers' bit by bit; angles by position; Megatron's factor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.transformer.attention import _yarn_get_concentration_factor_from_config
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mega_agentrl.actor.model.rotary_embedding import (
    PackedRotaryEmbedding,
    compute_inv_freq,
    set_attention_factor,
)
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


def test_megatron_receives_the_positions_as_the_sequence_length():
    rotary = PackedRotaryEmbedding(4, RopeConfig(theta=100.0))
    trees = tree_params((0, 2, 5))
    assert trees.position_S.tolist() == [0, 1, 0, 1, 2]
    assert rotary.get_rotary_seq_len(None, None, None, None, trees) is trees.position_S

"""Numbers by hand, and torch's own count over transformers' model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from mega_agentrl.estimate.flops import (
    forward_flops,
    layer_flops_per_token,
    peak_flops,
    train_flops,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.shapes import released


def test_a_layer_of_qwen2_5_7b_has_two_flops_a_weight():
    # 3584 wide, 28 + 4 heads of 128, MLP 18944: q, k, v, o and three MLP matrices.
    by_hand = 2 * (3584 * 3584 + 2 * 3584 * 512 + 3584 * 3584 + 3 * 3584 * 18944)
    assert layer_flops_per_token(released("qwen2.5-7b"), 0) == by_hand == 466_092_032


def test_the_rule_of_six_flops_a_parameter_holds_for_short_sequences():
    shape = released("qwen2.5-7b")
    # 7.62 billion parameters, 0.54 of them the embedding, which is a look-up.
    assert train_flops(shape, [1], 1) == pytest.approx(6 * (7.62e9 - 0.545e9), rel=2e-3)


def test_a_token_of_a_sparse_model_uses_only_its_experts():
    shape = released("qwen3-30b-a3b")
    per_token = forward_flops(shape, [1], 1)
    # 3.3 billion active parameters, 0.31 of them the embedding.
    assert per_token.total == pytest.approx(2 * (3.34e9 - 0.311e9), rel=0.02)


def test_attention_is_causal():
    shape = released("qwen2.5-7b")
    flops = forward_flops(shape, [1, 3], 0)
    # 1 + (1 + 2 + 3) pairs; two products of 28 heads of 128; 28 layers.
    assert flops.attention_scores == 28 * 7 * 2 * 2 * 28 * 128
    assert flops.output_layer == 0
    assert flops.linears == forward_flops(shape, [4], 0).linears


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "config", [Qwen2Config(**TINY), Qwen3MoeConfig(**TINY, **EXPERTS)], ids=["dense", "experts"]
)
def test_torch_counts_the_same_flops(config, tmp_path):
    # Its own loop over the experts: torch does not count the grouped product.
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model.save_pretrained(tmp_path)
    shape = ModelShape.from_folder(tmp_path)
    tokens = torch.randint(0, 64, (2, 24))
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    ours = forward_flops(shape, [24, 24], 48)
    # Eager attention multiplies all pairs, 24 * 24, where 24 * 25 / 2 count here. What is left is
    # the product that makes the rotary angles, below 1 %.
    counted = ours.linears + ours.attention_scores * 24 * 24 / (24 * 25 / 2) + ours.output_layer
    assert forward == pytest.approx(counted, rel=0.01)
    assert counter.get_total_flops() == pytest.approx(3 * counted, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, tera):
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["", "NVIDIA A10G", "NVIDIA GB10", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_other_gpus_have_no_known_peak(name):
    assert peak_flops(name) is None

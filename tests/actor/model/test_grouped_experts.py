"""Experts as one grouped product against Megatron's loop over them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from mega_agentrl.actor.model import grouped_experts
from mega_agentrl.actor.model.gpt_model import build_transformer_config
from mega_agentrl.actor.model.grouped_experts import (
    GroupedExperts,
    grouped_linear,
    supports_grouped_mm,
)
from mega_agentrl.actor.model.layer_spec import decoder_block_spec
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
COUNTS = {"all used": [3, 1, 5, 2], "one idle": [4, 0, 6, 1], "one used": [0, 0, 7, 0]}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_token_meets_the_weight_of_its_expert(counts):
    generator = torch.Generator().manual_seed(1)
    value_TK = torch.randn(sum(counts), 8, generator=generator, requires_grad=True)
    weights = [torch.randn(12, 8, generator=generator, requires_grad=True) for _ in counts]
    grad_TN = torch.randn(sum(counts), 12, generator=generator)
    end_E = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    leaves = [value_TK, *weights]
    grouped = grouped_linear(value_TK, end_E, weights)
    got = grouped, *torch.autograd.grad(grouped, leaves, grad_TN)
    single = torch.cat(
        [part @ weight.t() for part, weight in zip(value_TK.split(counts), weights, strict=True)]
    )
    expected = single, *torch.autograd.grad(single, leaves, grad_TN)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_frozen_weights_get_no_gradient():
    value_TK = torch.randn(4, 8, requires_grad=True)
    weights = [torch.randn(8, 8) for _ in range(2)]
    end_E = torch.tensor([1, 4], dtype=torch.int32)
    grouped_linear(value_TK, end_E, weights).sum().backward()
    assert value_TK.grad is not None and all(weight.grad is None for weight in weights)


@pytest.fixture
def experts(one_rank, tmp_path):
    """Return a rank's experts of a tiny model in a dtype, with random weights."""

    def build(dtype, **changes):
        shape = ModelShape.from_folder(make_tiny_model("qwen3_moe", tmp_path / "model", **changes))
        config = build_transformer_config(shape, one_rank, ParallelConfig(), dtype)
        # There are no buffers here to which Megatron's own layers could add their gradients.
        config.gradient_accumulation_fusion = False
        mp_rank = one_rank.coordinates.model_parallel_rank
        layer = decoder_block_spec(shape, mp_rank, 0).layer_specs[0]
        spec = layer.submodules.mlp.keywords["submodules"].experts
        assert spec.func is GroupedExperts
        made = spec(shape.moe.num_experts, config, pg_collection=one_rank.pg_collection)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return made

    return build


def outputs_and_gradients(forward, module, counts, dtype):
    generator = torch.Generator().manual_seed(2)
    width = module.config.hidden_size
    hidden_TD = torch.randn(sum(counts), width, generator=generator).to(dtype).requires_grad_()
    prob_T = torch.rand(sum(counts), generator=generator).requires_grad_()
    out_TD, bias = forward(hidden_TD, torch.tensor(counts), prob_T)
    assert bias is None
    weight_TD = torch.randn(out_TD.shape, generator=generator).to(dtype)
    leaves = [hidden_TD, prob_T, *module.parameters()]
    return out_TD, *torch.autograd.grad(out_TD, leaves, weight_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_experts_are_those_of_megatron(counts, dtype, experts, monkeypatch):
    module = experts(dtype, num_experts=4)
    expected = outputs_and_gradients(
        lambda *inputs: SequentialMLP.forward(module, *inputs), module, counts, dtype
    )
    assert supports_grouped_mm(CPU, dtype)
    monkeypatch.setattr(SequentialMLP, "forward", None)
    got = outputs_and_gradients(module, module, counts, dtype)
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_widths_that_no_kernel_takes_are_computed_one_after_another(experts, monkeypatch):
    calls = []
    monkeypatch.setattr(grouped_experts, "grouped_linear", lambda *_: calls.append(1))
    module = experts(torch.bfloat16, num_experts=4, moe_intermediate_size=20)
    assert not grouped_experts.has_aligned_rows(module.local_experts[0].linear_fc2.weight)
    out_TD, *_ = outputs_and_gradients(module, module, COUNTS["one idle"], torch.bfloat16)
    assert out_TD.shape == (11, module.config.hidden_size) and calls == []


def test_a_dtype_without_grouped_products_is_not_supported():
    assert not supports_grouped_mm(CPU, torch.int32)

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mega_agentrl.actor.model.rms_norm import RMSNorm


def norm(weight, eps=1e-6):
    made = RMSNorm(SimpleNamespace(params_dtype=weight.dtype), len(weight), eps=eps)
    made.weight.data = weight
    return made


def test_a_row_is_divided_by_its_root_mean_square():
    # mean of squares of (3, 4) and eps 0.5: 12.5 + 0.5 = 13
    out = norm(torch.tensor([1.0, 2.0]), eps=0.5)(torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 13**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_transformers(dtype):
    generator = torch.Generator().manual_seed(5)
    weight = (1 + 0.3 * torch.randn(64, generator=generator)).to(dtype)
    reference = Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    reference.weight.data = weight.clone()
    norm_module = norm(weight.clone())
    inputs = [
        (3 * torch.randn(7, 5, 64, generator=torch.Generator().manual_seed(6)))
        .to(dtype)
        .requires_grad_()
        for _ in range(2)
    ]
    outs = [module(value) for module, value in zip((norm_module, reference), inputs, strict=True)]
    # The same roundings in the same order: equal in bfloat16, not only close.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(outs[0], outs[1], rtol=tolerance, atol=tolerance)
    for out in outs:
        out.float().square().sum().backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    gradients = [norm_module.weight.grad, reference.weight.grad]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=tolerance, atol=tolerance)


def test_any_cut_of_the_tokens_gives_the_same_rows():
    value = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(2))
    made = norm(torch.arange(1.0, 9.0))
    torch.testing.assert_close(torch.cat([made(value[:2]), made(value[2:])]), made(value))

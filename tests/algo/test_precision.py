"""`algo.precision`: half and whole numbers become float32, float64 stays."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.precision import widened


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_becomes_float32(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    assert widened(x).dtype == torch.float32
    assert widened(x).tolist() == [[1.0] * 3] * 2


def test_float64_keeps_every_digit_and_its_gradient():
    x = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    widened(x).sum().backward()
    assert widened(x).item() == 0.1
    assert x.grad is not None and x.grad.item() == 1.0

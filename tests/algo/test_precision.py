"""`algo.precision`: half precision and integers become float32, float64 stays."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.precision import upcast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_upcast_to_float32(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    assert upcast(x).dtype == torch.float32
    assert upcast(x).tolist() == [[1.0] * 3] * 2


def test_float64_is_unchanged():
    x = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    upcast(x).sum().backward()
    assert upcast(x).item() == 0.1
    assert x.grad is not None and x.grad.item() == 1.0

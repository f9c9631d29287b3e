"""`algo.masking`: hand-worked sums and shifts, mask invariance, precision."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.masking import (
    masked_mean,
    masked_sum,
    masked_whiten,
    number_turns,
    shift,
    upcast,
)


def test_sum_and_mean_are_over_unmasked_values():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    assert masked_sum(x, mask).item() == 10.0
    assert masked_mean(x, mask).item() == pytest.approx(10 / 3)
    assert masked_sum(x, mask, 1).tolist() == [4.0, 6.0]
    assert masked_mean(x, mask, 1).tolist() == [2.0, 6.0]
    assert masked_mean(x, mask, 0).tolist() == [1.0, 0.0, 4.5]


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
def test_masked_values_have_no_effect_and_no_gradient(junk):
    mask = torch.tensor([True, False, True])
    clean = torch.tensor([1.0, 0.0, 5.0])
    x = torch.tensor([1.0, junk, 5.0], requires_grad=True)
    assert masked_mean(x, mask).item() == masked_mean(clean, mask).item() == 3.0
    masked_mean(x, mask).backward()
    assert x.grad is not None and x.grad.tolist() == [0.5, 0.0, 0.5]
    torch.testing.assert_close(masked_whiten(x, mask), masked_whiten(clean, mask))


def test_whitened_values_have_mean_zero_and_unbiased_variance_one():
    x = torch.tensor([[1.0, 3.0, 99.0], [5.0, 7.0, -99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    white = masked_whiten(x, mask)
    assert white[:, 2].tolist() == [0.0, 0.0]
    picked = white[mask.bool()]
    assert picked.mean().item() == pytest.approx(0, abs=1e-6)
    assert picked.var().item() == pytest.approx(1, abs=1e-5)
    assert picked[0].item() == pytest.approx(-3 / (20 / 3) ** 0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("by", "row"),
    [
        (0, [1.0, 2.0, 3.0]),
        (1, [0.0, 1.0, 2.0]),
        (-1, [2.0, 3.0, 0.0]),
        (-3, [0.0] * 3),
        (5, [0.0] * 3),
    ],
)
def test_shift_moves_values_and_fills_with_zeros(by, row):
    assert shift(torch.tensor([[1.0, 2.0, 3.0]]), by).tolist() == [row]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.float64])
def test_upcast_returns_float32_or_float64(dtype):
    x = torch.ones(2, 3, dtype=dtype)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert upcast(x).dtype == want and upcast(x).tolist() == [[1.0] * 3] * 2


def test_turns_are_runs_of_sampled_tokens():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 1, 1], [0] * 7])
    assert number_turns(mask).tolist() == [
        [0, 0, -1, 1, -1, -1, 2],
        [-1, 0, -1, -1, -1, 1, 1],
        [-1] * 7,
    ]

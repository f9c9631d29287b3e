from __future__ import annotations

import torch

from mega_agentrl.actor.vocab.tiling import (
    accumulate_gradients,
    compute_dtype,
    matmul_accumulate,
    split_range,
)


def test_split_range_covers_everything_once():
    assert list(split_range(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(split_range(3, 9)) == [slice(0, 3)]
    assert list(split_range(0, 3)) == []


def test_narrow_factors_have_wide_products():
    # 1 + 2^-9 is no bfloat16; its two terms are.
    left = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    out = torch.tensor([[4.0]])
    matmul_accumulate(out, left, torch.ones(2, 1, dtype=torch.bfloat16))
    assert out.item() == 5 + 2.0**-9
    assert compute_dtype(torch.bfloat16) == torch.float32
    assert compute_dtype(torch.float64) == torch.float64


def test_fresh_ignores_what_was_there():
    out = torch.tensor([[torch.nan]])
    matmul_accumulate(out, torch.tensor([[2.0]]), torch.tensor([[3.0]]), fresh=True)
    assert out.item() == 6


def test_gradients_are_those_of_the_whole_matrix():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, grad = (torch.randn(n, generator=generator) for n in ((7, 4), (9, 4), (7, 9)))
    before = torch.randn(7, 4, generator=generator)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        grad_hidden = before.clone()
        grad_weight = torch.full((9, 4), torch.nan, dtype=dtype)
        calls = []

        def tile(tokens, rows, calls=calls):
            calls.append((tokens.start, rows.start))
            return grad[tokens, rows]

        cuts = list(split_range(7, 3)), list(split_range(9, 4))
        accumulate_gradients(
            hidden.to(dtype), weight.to(dtype), tile, *cuts, grad_hidden, grad_weight
        )
        torch.testing.assert_close(grad_hidden, before + grad @ weight, rtol=bound, atol=10 * bound)
        torch.testing.assert_close(
            grad_weight.float(), grad.t() @ hidden, rtol=bound, atol=10 * bound
        )
        assert calls == [(tokens, rows) for rows in (0, 4, 8) for tokens in (0, 3, 6)]


def test_what_is_not_wanted_is_left_out():
    hidden, weight, grad = torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 4)
    everything = [slice(0, 2)], [slice(0, 4)]
    grad_hidden = torch.zeros(2, 3)
    accumulate_gradients(hidden, weight, lambda *_: grad, *everything, grad_hidden, None)
    assert grad_hidden.tolist() == [[4.0] * 3] * 2
    grad_weight = torch.zeros(4, 3)
    accumulate_gradients(hidden, weight, lambda *_: grad, *everything, None, grad_weight)
    assert grad_weight.tolist() == [[2.0] * 3] * 4

"""Products with a wide accumulator; the gradients of tiles are in `vocab_cases`."""

from __future__ import annotations

import torch

from mega_agentrl.actor.matmul import matmul_accumulate
from mega_agentrl.actor.vocab.tiling import accumulate_gradients, split_range


def test_narrow_factors_are_summed_in_the_dtype_of_the_result():
    # 1 + 2^-9 is no bfloat16; its two terms are.
    left = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    out = torch.tensor([[4.0]])
    matmul_accumulate(out, left, torch.ones(2, 1, dtype=torch.bfloat16))
    assert out.item() == 5 + 2.0**-9


def test_a_fresh_result_ignores_what_was_in_memory():
    out = torch.tensor([[torch.nan]])
    matmul_accumulate(out, torch.tensor([[2.0]]), torch.tensor([[3.0]]), fresh=True)
    assert out.item() == 6


def test_bfloat16_gradients_of_weights_are_summed_over_tokens_in_float32():
    # 1 + 3 * 2^-9 rounds to 1 + 2^-7; each 2^-9 added to 1 in bfloat16 would be lost.
    hidden = torch.tensor([[1.0], *[[2.0**-9]] * 3], dtype=torch.bfloat16)
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    grad_weight = torch.full_like(weight, torch.nan)
    one_by_one, row = list(split_range(4, 1)), [slice(0, 1)]
    accumulate_gradients(
        hidden, weight, lambda *_: torch.ones(1, 1), one_by_one, row, None, grad_weight
    )
    assert grad_weight.item() == 1 + 2.0**-7

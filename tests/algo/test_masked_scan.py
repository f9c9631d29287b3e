"""`algo.masked_scan`: the blockwise sum against the plain recursion, skipped masked positions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo.masked_scan import (
    BLOCK_TOKENS,
    ROWS_PER_CHUNK,
    apply_to_sampled_tokens,
    discounted_sum,
    shift_left,
)


def plain(row, factor):
    out, running = [], 0.0
    for value in reversed(row):
        running = value + factor * running
        out.append(running)
    return out[::-1]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    factor=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    width=st.sampled_from(
        [0, 1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS]
    ),
)
def test_blockwise_is_the_recursion(seed, factor, width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    want = torch.tensor([plain(row, factor) for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(discounted_sum(x, factor), want.view(3, width))


def test_shift_left_by_hand():
    assert shift_left(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist() == [
        [2.0, 3.0, 0.0],
        [5.0, 6.0, 0.0],
    ]


def test_masked_positions_are_skipped():
    x = torch.tensor([[1.0, math.nan, 2.0, 4.0], [math.inf, 8.0, 1.0, math.nan]])
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    total = apply_to_sampled_tokens(lambda row: discounted_sum(row, 0.5), mask, x)
    assert total.tolist() == [[3.0, 0.0, 4.0, 4.0], [0.0, 8.5, 1.0, 0.0]]
    pairs = apply_to_sampled_tokens(lambda row, other: shift_left(row) + other, mask, x, x)
    assert pairs.tolist() == [[3.0, 0.0, 6.0, 4.0], [0.0, 9.0, 1.0, 0.0]]


def test_more_rows_than_a_chunk():
    num_rows = ROWS_PER_CHUNK + 3
    x = torch.arange(num_rows, dtype=torch.float64)[:, None].expand(num_rows, 2)
    total = apply_to_sampled_tokens(
        lambda row: discounted_sum(row, 1.0), torch.ones(num_rows, 2), x
    )
    assert torch.equal(total[:, 0], 2 * x[:, 0]) and torch.equal(total[:, 1], x[:, 0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_batch(shape):
    empty = torch.zeros(shape)
    assert (
        apply_to_sampled_tokens(lambda row: discounted_sum(row, 0.9), empty, empty).shape == shape
    )


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"grid_BT \(1, 2\), mask_BT \(1, 3\)"):
        apply_to_sampled_tokens(shift_left, torch.ones(1, 3), torch.ones(1, 2))

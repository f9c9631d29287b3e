"""Assignment of rows to data ranks and micro-batches, and of rows to optimizer steps."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.batch.micro_batching import (
    minibatch_masks,
    minibatch_row_lengths,
    plan_micro_batches,
    token_imbalance,
)
from tests.parallel.reference import make_batch
from tests.train_batches import select_rows


def test_longest_rows_are_assigned_first():
    # 9 | 8, then 7 joins 8's lighter side, then 3 joins 9: loads 12 and 15.
    assert plan_micro_batches([9, 8, 7, 3], num_data=2, budget_tokens=100) == [[[0, 3]], [[1, 2]]]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    num_data=st.integers(1, 5),
    budget_tokens=st.integers(50, 200),
    num_multiple=st.integers(1, 4),
)
def test_every_row_once_within_budget_and_balanced(lengths, num_data, budget_tokens, num_multiple):
    plan = plan_micro_batches(
        lengths, num_data=num_data, budget_tokens=budget_tokens, num_multiple=num_multiple
    )
    rows = [row for rank in plan for micro in rank for row in micro]
    assert sorted(rows) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % num_multiple == 0
    for rank in plan:
        assert min(map(len, rank)) > 0 or max(map(len, rank)) <= 1
        for micro in rank:
            assert sum(lengths[row] for row in micro) <= budget_tokens
            assert micro == sorted(micro)
    loads = [sum(lengths[row] for micro in rank for row in micro) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_fewer_rows_than_ranks_leaves_empty_micro_batches():
    assert plan_micro_batches([4], num_data=3, budget_tokens=8) == [[[0]], [[]], [[]]]


def test_rounding_up_assigns_the_rows_anew():
    # Three micro-batches would do; four of one row each, not three and an empty one.
    assert plan_micro_batches([5, 4, 3, 2], num_data=1, budget_tokens=5) == [[[0], [1], [2, 3]]]
    assert plan_micro_batches([5, 4, 3, 2], num_data=1, budget_tokens=5, num_multiple=2) == [
        [[0], [1], [2], [3]]
    ]


def test_long_tailed_lengths_are_balanced():
    # Of 256 rows, a median of 900 tokens and a few ten times as long.
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6.8, 0.8))) + 1 for _ in range(256)]
    plan = plan_micro_batches(lengths, num_data=8, budget_tokens=16384, num_multiple=2)
    tokens = [[sum(lengths[row] for row in micro) for micro in rank] for rank in plan]
    mean = sum(lengths) / len(plan)
    assert max(map(sum, tokens)) <= 1.01 * mean
    # Data ranks go in step, so what counts is the longest of each position.
    assert sum(map(max, zip(*tokens, strict=True))) <= 1.03 * mean


def test_no_rows_and_a_row_beyond_the_budget_are_errors():
    with pytest.raises(ValueError, match="0 rows over 2 data ranks"):
        plan_micro_batches([], num_data=2, budget_tokens=8)
    with pytest.raises(ValueError, match=r"optim\.micro_batch_tokens=8: row 1 alone has 9"):
        plan_micro_batches([3, 9], num_data=1, budget_tokens=8)


def test_imbalance_by_hand():
    assert token_imbalance([[9, 8, 7, 3]], 2) == 15 / 13.5  # 9 + 3 against 8 + 7
    assert token_imbalance([[4]], 4) == 4.0  # three ranks have nothing to do
    # The fullest ranks of two steps are different ones, and the others wait in both.
    assert token_imbalance([[3, 1], [1, 3]], 2) == 1.5
    assert token_imbalance([[], [2, 2]], 2) == 1.0
    assert token_imbalance([], 3) == 1.0


def test_five_rows_in_two_steps_by_hand():
    mask_BT = torch.tensor([[1, 0], [1, 1], [0, 1], [0, 0], [1, 1]])
    first, second = minibatch_masks(mask_BT, 2)
    assert first.tolist() == [[1, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    assert second.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0], [1, 1]]
    assert first.dtype == torch.bool


def test_lengths_are_those_of_rows_that_are_trained_on():
    mask_BT = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [1, 1, 1]]).bool()
    given = select_rows(make_batch(), range(4)).with_fields(
        mask_BT=torch.nn.functional.pad(mask_BT, (0, 9)),
        prompt_ids=((1,), (1,), (1, 2, 3), (1,)),
        length_B=torch.tensor([3, 3, 3, 1]),
    )
    assert minibatch_row_lengths(given, 2) == [[3], [5, 1]]
    assert minibatch_row_lengths(given, 1) == [[3, 5, 1]]


@given(num_rows=st.integers(1, 9), num_steps=st.integers(1, 12))
def test_every_token_is_trained_on_once(num_rows, num_steps):
    mask_BT = torch.arange(num_rows * 3).reshape(num_rows, 3) % 2 == 0
    masks = list(minibatch_masks(mask_BT, num_steps))
    assert len(masks) == min(num_steps, num_rows)
    assert torch.equal(sum(mask.int() for mask in masks), mask_BT.int())
    # Even: the numbers of rows differ by at most one.
    whole = [mask.any(dim=1).sum().item() for mask in minibatch_masks(torch.ones(num_rows, 1), 3)]
    assert max(whole) - min(whole) <= 1


def test_an_empty_batch_is_one_empty_step():
    (mask_BT,) = minibatch_masks(torch.zeros(0, 4), 2)
    assert mask_BT.shape == (0, 4)

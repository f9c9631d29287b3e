"""Assignment of trees to data ranks and micro-batches, and of rows to optimizer steps."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.batch.micro_batching import InputLengths, minibatch_masks, plan_micro_batches
from mega_agentrl.batch.packed_rows import PackedRows
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from tests.tree_batches import make_tree_batch, tree_shapes


def flat(lengths):
    """Return inputs that share nothing."""
    return trees(lengths, [0] * len(lengths))


def trees(lengths, shared_lengths, **options):
    """Return inputs with these lengths, shared with the row before."""
    return InputLengths(
        length_R=np.array(lengths, dtype=np.int64),
        shared_length_R=np.array(shared_lengths, dtype=np.int64),
        **options,
    )


def test_longest_rows_are_assigned_first():
    # 9 | 8, then 7 joins 8's lighter side, then 3 joins 9: loads 12 and 15.
    plan = plan_micro_batches(flat([9, 8, 7, 3]), num_data=2, budget_tokens=100)
    assert plan == [[[0, 3]], [[1, 2]]]


def test_tokens_of_a_shared_prefix_count_once_in_tokens_and_cost():
    # A prompt of 4 with branches of 2, 3 and 1, the last of them a fork of the second.
    inputs = trees([6, 7, 7], [0, 4, 6], pairs_per_token=10.0)
    assert inputs.num_tokens([0, 1, 2]) == 6 + 3 + 1
    assert inputs.num_tokens([0, 2]) == 6 + 3
    # 21 pairs, 28 less the 10 of the prompt, and the 7 of the last token.
    assert inputs.cost([0, 1, 2]) == pytest.approx(10 + (21 + 18 + 7) / 10)
    assert trees([6, 7, 7], [0, 4, 6]).cost([0, 1, 2]) == 10


def test_a_tree_beyond_the_budget_is_cut_in_depth_first_order():
    # 10, 14 and 18 tokens; a fourth row makes 22, and begins a part of 10 again.
    shared = [0, 6, 6, 6, 6]
    plan = plan_micro_batches(trees([10] * 5, shared), num_data=1, budget_tokens=18)
    assert plan == [[[0, 1, 2], [3, 4]]]
    (whole,) = plan_micro_batches(trees([10] * 5, shared), num_data=1, budget_tokens=26)
    assert whole == [[0, 1, 2, 3, 4]]


def test_one_tree_is_divided_over_two_ranks_where_that_is_faster():
    # 10 + 7 * 4 tokens on one rank, or 10 + 3 * 4 on each of two.
    inputs = trees([10] * 8, [0] + [6] * 7)
    plan = plan_micro_batches(inputs, num_data=2, budget_tokens=100)
    assert sorted(inputs.num_tokens(micro) for (micro,) in plan) == [22, 22]
    # With a path of 9 each of two ranks would compute 13 of the 17 tokens: still faster.
    inputs = trees([10] * 8, [0] + [9] * 7)
    plan = plan_micro_batches(inputs, num_data=2, budget_tokens=100)
    assert max(inputs.num_tokens(micro) for (micro,) in plan) == 13


@given(
    drawn=tree_shapes(max_rows=12),
    num_data=st.integers(1, 5),
    budget_tokens=st.integers(0, 100),
    num_multiple=st.integers(1, 4),
)
def test_every_row_is_in_one_micro_batch_within_the_budget(
    drawn, num_data, budget_tokens, num_multiple
):
    rows = PackedRows.from_batch(make_tree_batch(drawn))
    inputs = trees(rows.input_length_R, rows.shared_input_length_R)
    budget_tokens += int(rows.input_length_R.max())
    plan = plan_micro_batches(
        inputs, num_data=num_data, budget_tokens=budget_tokens, num_multiple=num_multiple
    )
    numbers = [row for rank in plan for micro in rank for row in micro]
    assert sorted(numbers) == list(range(rows.num_rows))
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) % num_multiple == 0
    for micro in (micro for rank in plan for micro in rank):
        assert micro == sorted(micro)
        assert inputs.num_tokens(micro) <= budget_tokens


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    num_data=st.integers(1, 5),
    budget_tokens=st.integers(50, 200),
)
def test_rows_that_share_nothing_are_balanced(lengths, num_data, budget_tokens):
    plan = plan_micro_batches(flat(lengths), num_data=num_data, budget_tokens=budget_tokens)
    for rank in plan:
        assert min(map(len, rank)) > 0 or max(map(len, rank)) <= 1
    loads = [sum(lengths[row] for micro in rank for row in micro) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_fewer_rows_than_ranks_leaves_empty_micro_batches():
    assert plan_micro_batches(flat([4]), num_data=3, budget_tokens=8) == [[[0]], [[]], [[]]]


def test_rounding_up_assigns_the_rows_anew():
    # Three micro-batches would do; four of one row each, not three and an empty one.
    inputs = flat([5, 4, 3, 2])
    assert plan_micro_batches(inputs, num_data=1, budget_tokens=5) == [[[0], [1], [2, 3]]]
    assert plan_micro_batches(inputs, num_data=1, budget_tokens=5, num_multiple=2) == [
        [[0], [1], [2], [3]]
    ]


def test_long_tailed_lengths_are_balanced():
    # Of 256 rows, a median of 900 tokens and a few ten times as long.
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6.8, 0.8))) + 1 for _ in range(256)]
    plan = plan_micro_batches(flat(lengths), num_data=8, budget_tokens=16384, num_multiple=2)
    tokens = [[sum(lengths[row] for row in micro) for micro in rank] for rank in plan]
    mean = sum(lengths) / len(plan)
    assert max(map(sum, tokens)) <= 1.01 * mean
    # Data ranks go in step, so what counts is the longest of each position.
    assert sum(map(max, zip(*tokens, strict=True))) <= 1.03 * mean


def test_no_rows_and_a_row_beyond_the_budget_are_errors():
    with pytest.raises(InputError) as caught:
        plan_micro_batches(flat([]), num_data=2, budget_tokens=8)
    assert caught.value.got == {"rows": 0, "data ranks": 2, "multiple": 1}
    with pytest.raises(ConfigError) as caught:
        plan_micro_batches(flat([3, 9]), num_data=1, budget_tokens=8)
    assert (caught.value.key, caught.value.got) == ("optim.micro_batch_tokens", 8)


def masked(mask_BT, shared_lengths=None, trajectories=None):
    """Return what `minibatch_masks` reads of a batch with this mask."""
    shared_B = None if shared_lengths is None else torch.tensor(shared_lengths)
    trajectory_B = None if trajectories is None else torch.tensor(trajectories)
    return SimpleNamespace(mask_BT=mask_BT, shared_length_B=shared_B, trajectory_B=trajectory_B)


def test_rows_are_divided_over_steps_by_their_trained_tokens():
    mask_BT = torch.tensor([[1, 0], [1, 1], [0, 1], [0, 0], [1, 1]])
    first, second = minibatch_masks(masked(mask_BT), 2)
    assert first.tolist() == [[1, 0], [1, 1], [0, 0], [0, 0], [0, 0]]
    assert second.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0], [1, 1]]
    assert first.dtype == torch.bool


@pytest.mark.parametrize(
    ("starts", "num_steps", "expected"),
    [
        ([0, 3, 4], 2, [3, 3]),  # the middle is a start
        ([0, 5], 2, [5, 1]),
        ([0, 1, 2], 3, [1, 1, 4]),  # as many trees as steps
        ([0, 2, 5], 2, [2, 4]),  # 2 is nearer to 3 than 5 is
        ([0, 4], 3, [2, 2, 2]),  # too few trees: cut inside them
    ],
)
def test_steps_are_cut_between_trees(starts, num_steps, expected):
    shared = [0 if row in starts else 1 for row in range(6)]
    masks = minibatch_masks(masked(torch.ones(6, 1), shared), num_steps)
    assert [int(mask.sum()) for mask in masks] == expected


@pytest.mark.parametrize(
    ("shared", "trajectories", "expected"),
    [
        ([0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1], [4, 2]),  # row 3 begins no tree
        ([0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [2, 4]),  # one tree
        (None, [0, 0, 0, 0, 1, 1], [4, 2]),
        (None, [0, 0, 0, 0, 0, 0], [3, 3]),  # too few trajectories
    ],
)
def test_steps_are_cut_between_trajectories_of_several_rows(shared, trajectories, expected):
    masks = minibatch_masks(masked(torch.ones(6, 1), shared, trajectories), 2)
    assert [int(mask.sum()) for mask in masks] == expected


@given(num_rows=st.integers(1, 9), num_steps=st.integers(1, 12))
def test_every_token_is_trained_on_once(num_rows, num_steps):
    mask_BT = torch.arange(num_rows * 3).reshape(num_rows, 3) % 2 == 0
    masks = list(minibatch_masks(masked(mask_BT), num_steps))
    assert len(masks) == min(num_steps, num_rows)
    assert torch.equal(sum(mask.int() for mask in masks), mask_BT.int())
    # Even: the numbers of rows differ by at most one.
    ones = masked(torch.ones(num_rows, 1))
    whole = [mask.any(dim=1).sum().item() for mask in minibatch_masks(ones, 3)]
    assert max(whole) - min(whole) <= 1


def test_an_empty_batch_is_one_empty_step():
    (mask_BT,) = minibatch_masks(masked(torch.zeros(0, 4)), 2)
    assert mask_BT.shape == (0, 4)

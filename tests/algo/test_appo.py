"""`algo.appo` on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.algo.appo import dual_group, mismatch_value


def test_the_mismatch_of_later_tokens_counts_half_per_token():
    train = torch.tensor([[0.0, math.log(1.1), 9.0, math.log(1.21)], [-1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    got = mismatch_value(train, torch.zeros(2, 4), mask, gamma=0.5, bound=0.25)
    # Sums in units of ln 1.1: 2 at the end, 1 + 2/2 before, 2/2 at first; the masked token has 1.
    assert got[0].tolist() == pytest.approx([1.1, 1.21, 1.0, 1.21])
    assert got[1].tolist() == [1.0] * 4  # never below 1


def test_the_mismatch_is_bounded():
    got = mismatch_value(
        torch.tensor([[900.0]]), torch.zeros(1, 1), torch.ones(1, 1), gamma=1, bound=0.2
    )
    assert got[0].tolist() == pytest.approx([1.2])


def test_forks_are_compared_with_forks_and_count_for_the_nodes_above_them():
    """Root 0 has two forks from its node 0, one of which forks again; root 1 has none."""
    advantage, added = dual_group(
        torch.tensor([1.0, 3.0, 0.0, 0.0, 0.0]),
        torch.zeros(5),
        torch.tensor([False, True, True, True, False]),
        torch.tensor([1, 2, 4, 5, 6]),
        torch.tensor([-1, 0, 0, 0, 3, 3, -1]),
    )
    # Initial ones: 1 and 0, mean and std 1/2. Forks: 3, 0, 0, mean 1, std sqrt 2.
    assert advantage.tolist() == pytest.approx([1, 0, 0, 0, -1], abs=1e-5)
    high, low = 2**0.5, -(0.5**0.5)
    assert added.tolist() == pytest.approx([0, 0, high, low, low, low, 0], abs=1e-5)


def test_prompts_are_not_compared_with_each_other():
    leaf, parent = torch.arange(4), torch.full((4,), -1)
    advantage, _ = dual_group(
        torch.tensor([1.0, 0.0, 9.0, 9.0]),
        torch.tensor([5, 5, 2, 2]),
        torch.zeros(4, dtype=torch.bool),
        leaf,
        parent,
    )
    assert advantage.tolist() == pytest.approx([1, -1, 0, 0], abs=1e-5)

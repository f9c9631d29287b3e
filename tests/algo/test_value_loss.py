"""`algo.value_loss`: hand-worked clips and gradients, mask invariance."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.algo.policy_loss import AGGREGATION_MODES, aggregate, loss_denominator
from mega_agentrl.algo.value_loss import clipped_value_loss, explained_variance


@pytest.mark.parametrize(
    ("value", "target", "expected", "gradient", "clipfrac"),
    [
        # Old value 1, clip 0.5: between 0.5 and 1.5 the loss is the plain one.
        pytest.param(1.2, 3.0, 0.5 * 1.8**2, -1.8, 0.0, id="within reach"),
        pytest.param(1.0, 3.0, 0.5 * 2.0**2, -2.0, 0.0, id="unchanged"),
        # The loss of the bound, and no gradient.
        pytest.param(2.0, 3.0, 0.5 * 1.5**2, 0.0, 1.0, id="moved too far up to the return"),
        pytest.param(0.0, -1.0, 0.5 * 1.5**2, 0.0, 1.0, id="moved too far down to the return"),
        # The plain loss is the larger one and pulls back.
        pytest.param(0.0, 3.0, 0.5 * 3.0**2, -3.0, 0.0, id="moved away from the return"),
        pytest.param(6.0, 3.0, 0.5 * 3.0**2, 3.0, 0.0, id="moved beyond the return"),
    ],
)
def test_the_value_loss_is_the_larger_of_both_squares(value, target, expected, gradient, clipfrac):
    value_BT = torch.tensor([[value]], requires_grad=True)
    loss_BT, info = clipped_value_loss(
        value_BT, torch.tensor([[1.0]]), torch.tensor([[target]]), torch.ones(1, 1), clip=0.5
    )
    loss_BT.sum().backward()
    assert loss_BT.item() == pytest.approx(expected)
    assert value_BT.grad is not None and value_BT.grad.item() == pytest.approx(gradient)
    assert info["value_clipfrac"].item() == clipfrac


def test_an_infinite_clip_is_half_the_squared_error():
    value_BT, return_BT = torch.tensor([[5.0, -2.0]]), torch.tensor([[1.0, 1.0]])
    loss_BT, info = clipped_value_loss(
        value_BT, torch.zeros(1, 2), return_BT, torch.ones(1, 2), clip=math.inf
    )
    assert loss_BT.tolist() == [[8.0, 4.5]]
    assert info["value_clipfrac"].item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_masked_positions_have_no_effect_and_shards_add_up(mode):
    generator = torch.Generator().manual_seed(5)
    value, old, target = torch.randn(3, 4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.4
    dirty = value.masked_fill(~mask, math.nan).requires_grad_()
    denominator = loss_denominator(mask, mode, max_response_tokens=9)
    loss, _ = clipped_value_loss(value, old, target, mask, clip=0.3)
    whole = aggregate(loss, mask, mode, denominator=denominator)
    parts = [
        aggregate(
            clipped_value_loss(
                dirty[rows], old[rows], target.masked_fill(~mask, math.inf)[rows], mask[rows],
                clip=0.3,
            )[0],
            mask[rows],
            mode,
            denominator=denominator,
        )
        for rows in (slice(0, 1), slice(1, 4))
    ]  # fmt: skip
    torch.testing.assert_close(sum(parts), whole)
    sum(parts).backward()
    assert dirty.grad is not None and (dirty.grad[~mask] == 0).all()


def test_half_precision_returns_float32():
    half = torch.full((1, 1), 0.1, dtype=torch.bfloat16)
    loss_BT, _ = clipped_value_loss(half, half, half + 1, torch.ones(1, 1), clip=0.2)
    assert loss_BT.dtype == torch.float32


def test_explained_variance_is_the_part_that_errors_leave():
    return_BT = torch.tensor([[0.0, 2.0, 4.0, 99.0]])
    mask_BT = torch.tensor([[1, 1, 1, 0]])
    # Var(R) = 8/3; errors of 1, 1, -2 around mean 0 have variance 2.
    value_BT = torch.tensor([[-1.0, 1.0, 6.0, math.nan]])
    assert explained_variance(value_BT, return_BT, mask_BT).item() == pytest.approx(0.25)
    assert explained_variance(return_BT, return_BT, mask_BT).item() == 1.0
    # A constant shift explains everything: the mean is no error here.
    assert explained_variance(return_BT + 7, return_BT, mask_BT).item() == 1.0
    assert explained_variance(torch.zeros(1, 4), return_BT, mask_BT).item() == 0.0


@pytest.mark.parametrize("mask", [[[0, 0]], [[1, 0]], [[1, 1]]])
def test_constant_returns_have_no_explained_variance(mask):
    got = explained_variance(
        torch.tensor([[1.0, 2.0]]), torch.full((1, 2), 0.1), torch.tensor(mask)
    )
    assert got.isnan()

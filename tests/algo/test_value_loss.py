"""`algo.value_loss`: hand-worked clips and gradients, mask invariance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo.policy_loss import AGGREGATION_MODES, aggregate, loss_denominator
from mega_agentrl.algo.value_loss import clipped_value_loss, explained_variance


@pytest.mark.parametrize(
    ("value", "expected", "gradient", "clipfrac"),
    [
        # Old value 1, clip 0.5, return 3: within reach, at most 1.5 counts.
        (1.2, 0.5 * 1.8**2, -1.8, 0.0),
        # Moved too far towards the return: the bound's loss, (1.5 - 3)^2 / 2, and no gradient.
        (2.0, 0.5 * 1.5**2, 0.0, 1.0),
        # Moved too far away from it: the plain loss is the larger one and pulls back.
        (0.0, 0.5 * 3.0**2, -3.0, 0.0),
        # Far beyond the return: plain again.
        (6.0, 0.5 * 3.0**2, 3.0, 0.0),
    ],
)
def test_one_value_by_hand(value, expected, gradient, clipfrac):
    value_BT = torch.tensor([[value]], requires_grad=True)
    loss_BT, info = clipped_value_loss(
        value_BT, torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.ones(1, 1), clip=0.5
    )
    loss_BT.sum().backward()
    assert loss_BT.item() == pytest.approx(expected)
    assert value_BT.grad is not None and value_BT.grad.item() == pytest.approx(gradient)
    assert info["value_clipfrac"].item() == clipfrac


def test_gradient_is_the_slope():
    # A quadratic's central difference is exact: a wide step leaves only rounding.
    value, old = torch.tensor([[1.2, 2.0, 0.0, 6.0]]), torch.ones(1, 4)
    rest = (old, torch.full((1, 4), 3.0), torch.ones(1, 4))
    point = value.clone().requires_grad_()
    (got,) = torch.autograd.grad(clipped_value_loss(point, *rest, clip=0.5)[0].sum(), point)
    step = 0.05
    above, below = (clipped_value_loss(value + sign * step, *rest, clip=0.5)[0] for sign in (1, -1))
    torch.testing.assert_close(got, (above - below) / (2 * step), atol=1e-4, rtol=1e-4)


def test_an_infinite_clip_is_half_the_squared_error():
    value_BT, return_BT = torch.tensor([[5.0, -2.0]]), torch.tensor([[1.0, 1.0]])
    loss_BT, info = clipped_value_loss(
        value_BT, torch.zeros(1, 2), return_BT, torch.ones(1, 2), clip=math.inf
    )
    assert loss_BT.tolist() == [[8.0, 4.5]]
    assert info["value_clipfrac"].item() == 0.0


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), clip=st.floats(0.01, 3.0))
def test_clip_never_lowers_the_loss_and_an_unchanged_value_has_the_plain_loss(seed, clip):
    generator = torch.Generator().manual_seed(seed)
    value, old, target = torch.randn(3, 4, 5, generator=generator)
    mask = torch.ones(4, 5)
    plain = 0.5 * (value - target).square()
    loss, _ = clipped_value_loss(value, old, target, mask, clip=clip)
    assert (loss >= plain - 1e-6).all()
    still, info = clipped_value_loss(value, value, target, mask, clip=clip)
    torch.testing.assert_close(still, plain)
    assert info["value_clipfrac"].item() == 0.0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_masked_positions_have_no_effect_and_shards_add_up(mode):
    generator = torch.Generator().manual_seed(5)
    value, old, target = torch.randn(3, 4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) > 0.4
    dirty = value.masked_fill(~mask, math.nan).requires_grad_()
    whole = aggregate(clipped_value_loss(value, old, target, mask, clip=0.3)[0], mask, mode)
    parts = [
        aggregate(
            clipped_value_loss(
                dirty[rows], old[rows], target.masked_fill(~mask, math.inf)[rows], mask[rows],
                clip=0.3,
            )[0],
            mask[rows],
            mode,
            denominator=loss_denominator(mask, mode),
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


def test_explained_variance_by_hand():
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
def test_constant_returns_give_nan(mask):
    got = explained_variance(
        torch.tensor([[1.0, 2.0]]), torch.full((1, 2), 0.1), torch.tensor(mask)
    )
    assert got.isnan()


def test_bad_input():
    three, two = torch.zeros(1, 3), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"value_BT \(1, 3\).*return_BT \(1, 2\)"):
        clipped_value_loss(three, three, two, three, clip=0.5)
    with pytest.raises(ValueError, match="expected 2 axes"):
        explained_variance(torch.zeros(3), torch.zeros(3), torch.zeros(3))

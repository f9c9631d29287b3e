"""`algo.correction`: weights by hand, unbiasedness without a cap, mask invariance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.correction import LEVELS, MODES, importance_weights, logprob_mismatch
from mega_agentrl.errors import InputError

LN = torch.log


def weights(ratios, mask, **options):
    """Weights and metrics for per-token ratios."""
    rollout = torch.full((len(ratios), len(ratios[0])), -1.5, dtype=torch.float64)
    train = rollout + LN(torch.tensor(ratios, dtype=torch.float64))
    return importance_weights(train, rollout, torch.tensor(mask), **options)


@pytest.mark.parametrize(
    ("level", "mode", "want"),
    [
        ("token", "truncated", [[0.5, 2.0, 0.0], [1.0, 0.25, 2.0]]),
        ("token", "masked", [[0.5, 0.0, 0.0], [1.0, 0.25, 2.0]]),
        ("sequence", "truncated", [[2.0, 2.0, 0.0], [0.5, 0.5, 0.5]]),
        ("sequence", "masked", [[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]),
    ],
)
def test_importance_weights_are_those_worked_out_by_hand(level, mode, want):
    got, info = weights(
        [[0.5, 8.0, 9.0], [1.0, 0.25, 2.0]],
        [[1, 1, 0], [1, 1, 1]],
        level=level,
        mode=mode,
        cap=2.0,
    )
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
    assert info["capped_fraction"].item() == pytest.approx(1 / 5 if level == "token" else 2 / 5)
    assert info["weight_mean"].item() == pytest.approx(sum(map(sum, want)) / 5)


def test_metrics_of_the_mismatch_are_those_worked_out_by_hand():
    _, info = weights([[2.0, 0.5]], [[1, 1]], level="token", mode="truncated", cap=9.0)
    ln2 = math.log(2)
    assert info["logp_mean_abs"].item() == info["logp_max_abs"].item() == pytest.approx(ln2)
    assert info["kl_k1"].item() == pytest.approx(0.0)
    assert info["kl_k3"].item() == pytest.approx((2.5 - 2) / 2)
    assert info["ratio_mean"].item() == 1.25
    assert info["ess"].item() == pytest.approx(2.5**2 / (2 * 4.25))


@pytest.mark.parametrize("num_copies", [1, 40])
def test_differences_of_probabilities_are_those_worked_out_by_hand(num_copies):
    """|0.5 - 0.25|, |0.25 - 0.5| and |0.125 - 0.125|: mean 1/6, variance 1/24 - 1/36 = 1/72.

    The copies of the row go through the sums in several parts.
    """
    rollout = LN(torch.tensor([[0.5, 0.25, 0.125, 0.9]])).repeat(num_copies, 1)
    train = LN(torch.tensor([[0.25, 0.5, 0.125, 0.1]])).repeat(num_copies, 1)
    mask = torch.tensor([[1, 1, 1, 0]]).repeat(num_copies, 1)
    _, weighed = importance_weights(train, rollout, mask, level="sequence", mode="masked", cap=0.1)
    for info in (logprob_mismatch(train, rollout, mask), weighed):
        assert info["prob_mean_abs"].item() == pytest.approx(1 / 6)
        assert info["prob_max_abs"].item() == pytest.approx(0.25)
        assert info["prob_std_abs"].item() == pytest.approx(math.sqrt(1 / 72))
    swapped = logprob_mismatch(rollout, train, mask)
    assert swapped["prob_mean_abs"].item() == pytest.approx(1 / 6)


def test_constant_probability_difference_has_zero_std():
    rollout, train = LN(torch.full((3, 7), 0.3)), LN(torch.full((3, 7), 0.1))
    info = logprob_mismatch(train, rollout, torch.ones(3, 7))
    assert info["prob_mean_abs"].item() == pytest.approx(0.2)
    assert info["prob_max_abs"].item() == pytest.approx(0.2)
    assert info["prob_std_abs"].item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_have_weight_one(level, mode):
    logp = torch.tensor([[-1.0, -2.0, -3.0]])
    mask = torch.tensor([[1, 0, 1]])
    dirty = torch.tensor([[-1.0, math.nan, -3.0]])
    got, info = importance_weights(dirty, logp, mask, level=level, mode=mode, cap=2.0)
    assert got.tolist() == [[1.0, 0.0, 1.0]]
    assert info["ess"].item() == info["ratio_mean"].item() == info["weight_mean"].item() == 1.0
    assert (
        info["logp_max_abs"].item() == info["kl_k3"].item() == info["capped_fraction"].item() == 0.0
    )
    assert info["prob_max_abs"].item() == info["prob_std_abs"].item() == 0.0


def test_weights_have_no_gradient_and_do_not_overflow():
    train = torch.tensor([[0.0, 0.0]], requires_grad=True)
    rollout = torch.tensor([[-900.0, -1.0]])
    got, info = importance_weights(
        train, rollout, torch.ones(1, 2), level="sequence", mode="truncated", cap=5.0
    )
    assert got.tolist() == [[5.0, 5.0]] and not got.requires_grad
    assert all(value.isfinite() for value in info.values())


def test_sum_and_mean_are_zero_where_nothing_is_unmasked():
    info = logprob_mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    assert all(value.item() == 0.0 for value in info.values())


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(0, 99))
def test_uncapped_weights_are_unbiased(parts, seed):
    """Over the whole vocabulary: sum of rollout p * w * x = sum of train p * x."""
    rollout = torch.tensor(parts, dtype=torch.float64)
    rollout = rollout / rollout.sum()
    shift = torch.randn(len(parts), generator=torch.Generator().manual_seed(seed)).double()
    train = (rollout.log() + shift).softmax(0)
    got, info = importance_weights(
        train.log()[:, None],
        rollout.log()[:, None],
        torch.ones(len(parts), 1),
        level="token",
        mode="truncated",
        cap=1e9,
    )
    torch.testing.assert_close(rollout * got[:, 0], train)
    assert info["kl_k3"] >= 0 and 0 < info["ess"] <= 1 + 1e-9
    for mode in MODES:
        capped, _ = importance_weights(
            train.log()[:, None],
            rollout.log()[:, None],
            torch.ones(len(parts), 1),
            level="token",
            mode=mode,
            cap=1.0,
        )
        assert (capped <= torch.minimum(got, torch.ones_like(got)) + 1e-12).all()


@pytest.mark.parametrize("change", [{"level": "turn"}, {"mode": "clip"}, {"cap": 0.0}])
def test_unknown_levels_and_modes_and_a_cap_of_zero_are_refused(change):
    one = torch.zeros(1, 1)
    ((name, value),) = change.items()
    with pytest.raises(InputError) as caught:
        importance_weights(one, one, one, **{"level": "token", "mode": "masked", "cap": 2} | change)
    assert (caught.value.name, caught.value.got) == (name, value)

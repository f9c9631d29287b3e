"""`algo.policy_loss`: golden values and gradients, and shards that add up."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo import advantage
from mega_agentrl.algo.policy_loss import (
    AGGREGATION_MODES,
    LOSSES,
    aggregate,
    cispo,
    clipped,
    dapo,
    dr_grpo,
    find_loss,
    gspo,
    loss_denominator,
)

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((FOLDER / "policy_loss_and_kl.json").read_text(encoding="utf-8"))
AEPO = json.loads((FOLDER / "aepo.json").read_text(encoding="utf-8"))
MODE_OF = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_sum_norm",
}
RANGE = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize("name", MODE_OF)
@pytest.mark.parametrize("case", GOLDEN["policy_loss"], ids=lambda case: case["name"])
def test_golden_loss_metrics_and_gradient(case, name):
    expected = case["verl"][name]
    logp = torch.tensor(case["log_prob"], requires_grad=True)
    mask = torch.tensor(case["mask"])
    loss_BT, info = clipped(
        logp,
        torch.tensor(case["old_log_prob"]),
        torch.tensor(case["advantages"]),
        mask,
        clip_low=case["clip_low"],
        clip_high=case["clip_high"],
        clip_dual=case["clip_ratio_c"],
    )
    loss = aggregate(loss_BT, mask, MODE_OF[name])
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    assert {key: value.item() for key, value in info.items()} == pytest.approx(
        {key: expected[key] for key in ("clipfrac", "clipfrac_lower", "approx_kl")}, abs=1e-5
    )
    torch.testing.assert_close(
        logp.grad, torch.tensor(expected["dloss_dlogp"]), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("case", [row for row in AEPO["loss"] if not row["adv_balanced"]])
def test_golden_balanced_clip(case):
    logp = torch.tensor([case["new"]], requires_grad=True)
    mask = torch.ones_like(logp)
    loss_BT, _ = clipped(
        logp,
        torch.tensor([case["old"]]),
        torch.tensor([case["adv"]]),
        mask,
        clip_low=case["eps_low"],
        clip_high=case["eps_high"],
        clip_dual=3.0,
        balanced=case["clip_balanced"],
    )
    loss = aggregate(loss_BT, mask, "token_mean")
    loss.backward()
    assert logp.grad is not None
    assert loss_BT[0].tolist() == pytest.approx(case["per_token"], abs=1e-5)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
    assert logp.grad[0].tolist() == pytest.approx(case["grad"], abs=1e-5)


@pytest.mark.parametrize(("balanced", "factor"), [(False, 0.0), (True, -1.2)])
def test_above_the_range_only_the_balanced_clip_has_a_gradient(balanced, factor):
    logp = torch.tensor([[0.3]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, _ = clipped(logp, torch.zeros(1, 1), one, one, **RANGE, balanced=balanced)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-1.2)
    assert logp.grad is not None and logp.grad.item() == pytest.approx(factor)


def test_masked_positions_have_no_effect():
    mask = torch.tensor([[1, 0], [1, 1]])
    clean = torch.tensor([[-1.0, 0.0], [-2.0, -0.5]])
    logp = clean.clone()
    logp[0, 1] = float("-inf")
    logp.requires_grad_()
    advantage = torch.tensor([[1.0, float("nan")], [-1.0, 2.0]])
    loss, info = clipped(logp, clean, advantage, mask, **RANGE, clip_dual=3.0)
    assert loss[0, 1].item() == 0.0 and loss.isfinite().all()
    assert all(value.isfinite() for value in info.values())
    aggregate(loss, mask, "token_mean").backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, torch.tensor([[-1, 0.0], [1, -2]]) / 3)


def test_a_huge_ratio_stays_finite():
    logp = torch.tensor([[0.0]], requires_grad=True)
    loss, _ = clipped(logp, torch.tensor([[-500.0]]), -torch.ones(1, 1), torch.ones(1, 1), **RANGE)
    loss.sum().backward()
    assert loss.isfinite().all() and logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 4))
def test_shards_with_the_global_denominator_add_up(mode, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(5, 6, generator=generator)
    mask = torch.rand(5, 6, generator=generator) > 0.4
    whole = aggregate(loss, mask, mode)
    total = loss_denominator(mask, mode)
    parts = [
        aggregate(loss[rows], mask[rows], mode, denominator=total)
        for rows in (slice(0, cut), slice(cut, 5))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_fully_masked_row_changes_no_aggregation():
    loss = torch.tensor([[1.0, 2.0], [7.0, 7.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    for mode in AGGREGATION_MODES:
        torch.testing.assert_close(aggregate(loss, mask, mode), aggregate(loss[:1], mask[:1], mode))


@pytest.mark.parametrize(
    ("lengths", "advantages", "seq_mean", "token_mean"), [((10, 5), (1.0, -1.0), -0.05, 0.0)]
)
def test_weight_of_a_shared_token_depends_on_the_aggregation(
    lengths, advantages, seq_mean, token_mean
):
    mask = torch.arange(10)[None] < torch.tensor(lengths)[:, None]
    logp = torch.zeros(2, 10, requires_grad=True)
    grid = torch.tensor(advantages)[:, None].expand(2, 10)
    loss, _ = clipped(logp, torch.zeros(2, 10), grid, mask, **RANGE)
    for mode, expected in (("seq_mean_token_mean", seq_mean), ("token_mean", token_mean)):
        (gradient,) = torch.autograd.grad(aggregate(loss, mask, mode), logp, retain_graph=True)
        assert -gradient[:, 0].sum().item() == pytest.approx(expected, abs=1e-6)


def _random(seed, *, spread=0.3):
    """float64 log-probs, old ones, advantages and a mask; no ratio lies at a kink of the losses."""
    generator = torch.Generator().manual_seed(seed)
    old, logp, gain = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    return old - 2 + spread * logp, old - 2, gain, mask


def _check_gradient(loss, logp):
    """Autograd against central differences, entry by entry."""
    point = logp.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(point), point)
    step, want = 1e-6, torch.zeros_like(logp)
    for index in range(logp.numel()):
        nudge = torch.zeros_like(logp).view(-1)
        nudge[index] = step
        nudge = nudge.view_as(logp)
        want.view(-1)[index] = (loss(logp + nudge) - loss(logp - nudge)) / (2 * step)
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_clipped_gradient_is_the_slope(mode, dual, seed):
    logp, old, gain, mask = _random(seed, spread=0.8)

    def loss(point):
        value, _ = clipped(point, old, gain, mask, **RANGE, clip_dual=dual)
        return aggregate(value, mask, mode)

    _check_gradient(loss, logp)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_gspo_gradient_is_the_slope(mode, seed):
    logp, old, gain, mask = _random(seed)

    def loss(point):
        value, _ = gspo(point, old, gain[:, 0], mask, **RANGE)
        return aggregate(value, mask, mode)

    _check_gradient(loss, logp)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_and_balanced_gradients_are_the_slope_at_fixed_weights(seed):
    """Both hold a factor still: the slope is that of the loss with the factor frozen."""
    logp, old, gain, mask = _random(seed, spread=0.8)
    on = mask.double()
    weight = (logp - old).exp().clamp(0.8, 1.2) * gain * on

    point = logp.clone().requires_grad_()
    value, info = cispo(point, old, gain, mask, **RANGE)
    torch.testing.assert_close(value.detach(), -weight * logp)
    (got,) = torch.autograd.grad(value.sum(), point)
    torch.testing.assert_close(got, -weight)
    assert info["clipfrac"] > 0

    value, _ = clipped(point, old, gain, mask, **RANGE, balanced=True)
    (got,) = torch.autograd.grad(value.sum(), point)
    ratio = (logp - old).exp()
    factor = torch.where((gain > 0) & (ratio > 1.2), 1.2, ratio)
    factor = torch.where((gain < 0) & (ratio < 0.8), 0.0, factor)
    torch.testing.assert_close(got, -factor * gain * on)


def test_gspo_by_hand():
    # Mean log-ratios 0.1 and 0.5: ratios 1.105 and 1.649; the second is cut at 1.2 for A > 0.
    logp = torch.tensor([[0.3, -0.1, 9.0], [0.5, 0.5, 0.5]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    loss, info = gspo(logp, torch.zeros(2, 3), torch.tensor([-2.0, 3.0]), mask, **RANGE)
    first = 2 * 2.718281828**0.1
    expected = torch.tensor([[first, first, 0], [-3.6] * 3])
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert info["clipfrac"].item() == pytest.approx(3 / 5)
    aggregate(loss, mask, "seq_mean_token_mean").backward()
    assert logp.grad is not None
    assert logp.grad[0].tolist() == pytest.approx([first / 4, first / 4, 0], abs=1e-5)
    assert logp.grad[1].tolist() == [0.0] * 3


def test_cispo_by_hand():
    logp = torch.tensor([[-1.0, -2.0, float("nan")]], requires_grad=True)
    old = torch.tensor([[-1.0, -9.0, 0.0]])
    gain = torch.tensor([[2.0, 1.0, 5.0]])
    loss, info = cispo(logp, old, gain, torch.tensor([[1, 1, 0]]), **RANGE)
    assert loss[0].tolist() == pytest.approx([2.0, 2.4, 0.0])
    assert info["clipfrac"].item() == 0.5
    loss.sum().backward()
    assert logp.grad is not None and logp.grad[0].tolist() == pytest.approx([-2.0, -1.2, 0.0])


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("loss_of", [clipped, gspo, cispo])
def test_masked_values_do_not_change_the_losses(loss_of, junk):
    logp, old, gain, mask = (value.float() for value in _random(7))
    gain = gain[:, 0] if loss_of is gspo else gain
    plain, info = loss_of(logp, old, gain, mask, **RANGE)
    off = mask == 0
    dirty = logp.masked_fill(off, junk).requires_grad_()
    dirty_gain = gain if loss_of is gspo else gain.masked_fill(off, junk)
    got, got_info = loss_of(dirty, old.masked_fill(off, -junk), dirty_gain, mask, **RANGE)
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(got_info, info)
    got.sum().backward()
    assert dirty.grad is not None and (dirty.grad[off] == 0).all()
    assert dirty.grad.isfinite().all()


def test_presets():
    logp, old, gain, mask = _random(3, spread=0.8)
    for preset, high, mode in ((dapo, 0.28, "token_mean"), (dr_grpo, 0.2, "seq_sum_norm")):
        got, info = preset(logp, old, gain, mask)
        loss, same = clipped(logp, old, gain, mask, clip_low=0.2, clip_high=high)
        assert torch.equal(got, aggregate(loss, mask, mode))
        assert info == same
    reward, group = torch.tensor([1.0, 0, 0, 0]), torch.zeros(4)
    got = advantage.grpo(reward, group, norm_by_std=dr_grpo.norm_by_std)
    assert got.tolist() == [0.75, -0.25, -0.25, -0.25] and dapo.norm_by_std
    halves = [dapo(logp[rows], old[rows], gain[rows], mask[rows], denominator=mask.sum())[0]
              for rows in (slice(0, 1), slice(1, 4))]  # fmt: skip
    torch.testing.assert_close(sum(halves), dapo(logp, old, gain, mask)[0])


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_soft_is_hard_on_shared_tokens_under_token_mean_with_equal_ratios(seed):
    """Rows fork from one another; the gradients of a token's copies add up to the same."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(3, 9, (5,), generator=generator)
    mask = torch.arange(8)[None] < length[:, None]
    node = torch.arange(40).view(5, 8)
    for row in range(1, 5):
        parent = int(torch.randint(0, row, (), generator=generator))
        shared = int(
            torch.randint(0, int(min(length[row], length[parent])), (), generator=generator)
        )
        node[row, :shared] = node[parent, :shared]
    scalar = torch.randn(5, generator=generator)
    shared_logp = torch.randn(40, generator=generator)
    gradients = []
    for grid in (advantage.broadcast(scalar, mask), advantage.arpo_hard(scalar, node, mask)):
        logp = (shared_logp + 0.05).requires_grad_()
        loss, _ = clipped(logp[node], shared_logp[node], grid, mask, **RANGE)
        gradients.append(torch.autograd.grad(aggregate(loss, mask, "token_mean"), logp)[0])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_registered_loss_has_the_options_and_metrics_of_its_record(name):
    loss = find_loss(name)
    parameters = signature(loss.function).parameters.values()
    keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert set(loss.options) == keywords - {"balanced"}
    options = {key: 0.2 if key != "clip_dual" else 3.0 for key in loss.options}
    grid = torch.tensor([[0.5, -0.5]])
    loss_BT, info = loss(grid, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), **options)
    assert loss_BT.shape == (1, 2)
    assert tuple(info) == loss.metrics
    with pytest.raises(ValueError, match="got temperature"):
        loss(grid, grid, grid, torch.ones(1, 2), **options, temperature=1.0)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss=clip: expected one of clipped"):
        find_loss("clip")


def test_bad_input():
    with pytest.raises(ValueError, match=r"logp_BT \(1, 2\).*mask_BT \(1, 3\)"):
        clipped(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 3), **RANGE)
    with pytest.raises(ValueError, match=r"\[B\] \(2,\) and \[B, T\] \(1, 2\)"):
        gspo(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2), torch.ones(1, 2), **RANGE)
    with pytest.raises(ValueError, match=r"old_logp_BT \(1, 1\)"):
        cispo(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 2), torch.ones(1, 2), **RANGE)
    with pytest.raises(ValueError, match="expected 2 axes"):
        aggregate(torch.zeros(3), torch.ones(3), "token_mean")
    with pytest.raises(ValueError, match="mode=mean: expected one of token_mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")

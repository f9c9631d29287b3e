"""`algo.policy_loss`: golden values and gradients, and sums that survive any cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.policy_loss import MODES, aggregate, clipped, count

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


def test_masked_positions_never_matter_whatever_they_hold():
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


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 4))
def test_shards_with_the_global_denominator_add_up(mode, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(5, 6, generator=generator)
    mask = torch.rand(5, 6, generator=generator) > 0.4
    whole = aggregate(loss, mask, mode)
    total = count(mask, mode)
    parts = [
        aggregate(loss[rows], mask[rows], mode, denominator=total)
        for rows in (slice(0, cut), slice(cut, 5))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_a_wholly_masked_row_changes_no_mode():
    loss = torch.tensor([[1.0, 2.0], [7.0, 7.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    for mode in MODES:
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


def test_bad_input():
    with pytest.raises(ValueError, match=r"logp_BT \(1, 2\).*mask_BT \(1, 3\)"):
        clipped(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 3), **RANGE)
    with pytest.raises(ValueError, match="expected 2 axes"):
        aggregate(torch.zeros(3), torch.ones(3), "token_mean")
    with pytest.raises(ValueError, match="mode=mean: expected one of token_mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean")

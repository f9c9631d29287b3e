"""`algo.kl`: golden values, the clamp, and gradients that stay finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.kl import AdaptiveKL, apply_kl_penalty, kl_penalty, update
from mega_agentrl.errors import InputError
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("policy_loss_and_kl")
KIND_OF = {"kl": "k1", "abs": "abs", "mse": "k2"}


@pytest.mark.parametrize("case", GOLDEN["kl"], ids=lambda case: case["type"])
def test_penalties_are_those_of_verl(case):
    got = kl_penalty(
        torch.tensor([case["log_prob"]]),
        torch.tensor([case["ref_log_prob"]]),
        KIND_OF[case["type"]],
    )
    torch.testing.assert_close(got, torch.tensor([case["verl"]]), atol=1e-5, rtol=1e-5)


def test_k3_is_the_formula_and_clamped_at_ten():
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -40.0]])
    got = kl_penalty(logp, ref, "k3")[0]
    assert got[0].item() == pytest.approx(2.718281828**-1 - 1 + 1)
    assert got[1].item() == 10.0


@given(st.lists(st.tuples(st.floats(-200, 0), st.floats(-200, 0)), min_size=1, max_size=8))
def test_k3_is_never_negative_and_its_gradient_is_finite(pairs):
    logp, ref = torch.tensor(pairs).T.unsqueeze(1)
    logp = logp.clone().requires_grad_()
    k3 = kl_penalty(logp, ref, "k3")
    assert (k3 >= -1e-7).all()  # rounding
    (gradient,) = torch.autograd.grad(k3.sum(), logp)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradient_is_the_slope(kind):
    generator = torch.Generator().manual_seed(3)
    logp, ref = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    point = logp.clone().requires_grad_()
    (got,) = torch.autograd.grad(kl_penalty(point, ref, kind).sum(), point)
    step = 1e-6  # one position does not reach another: all may be moved at once
    want = (kl_penalty(logp + step, ref, kind) - kl_penalty(logp - step, ref, kind)) / (2 * step)
    torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)


def test_the_kl_penalty_is_subtracted_from_unmasked_rewards():
    reward = torch.tensor([[0.0, 0.0, 1.0]])
    kl = torch.tensor([[0.5, float("nan"), -0.25]], requires_grad=True)
    got = apply_kl_penalty(reward, kl, torch.tensor([[1, 0, 1]]), coef=0.2)
    assert got[0].tolist() == pytest.approx([-0.1, 0.0, 1.05]) and not got.requires_grad


def test_the_adaptive_coefficient_moves_towards_the_target_within_its_clip():
    state = AdaptiveKL(coef=0.1, target=0.02, horizon=100)
    assert update(state, 0.022, 10).coef == pytest.approx(0.1 * 1.01)
    assert update(state, 5.0, 10).coef == pytest.approx(0.1 * 1.02)
    assert update(state, 0.0, 10).coef == pytest.approx(0.1 * 0.98)
    assert update(state, 0.02, 10) == state
    assert state.coef == 0.1


def test_a_kl_far_above_the_target_lifts_the_weight_by_the_samples_of_each_step():
    """1,000 steps of 256 samples with the horizon of 10,000 samples: 1.00512^1000 = 165."""
    state = AdaptiveKL(coef=0.001, target=0.01, horizon=10_000)
    for _ in range(1000):
        state = update(state, 2.0, 256)
    assert state.coef == pytest.approx(0.165, rel=2e-3)


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError) as caught:
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    assert (caught.value.name, caught.value.got) == ("kind", "k4")


@pytest.mark.parametrize("change", [{"coef": -1}, {"target": 0}, {"horizon": 0}])
def test_adaptive_kl_refuses_values_out_of_range(change):
    ((name, value),) = change.items()
    with pytest.raises(InputError) as caught:
        AdaptiveKL(**{"coef": 0.1, "target": 0.02, "horizon": 10} | change)
    assert (caught.value.name, caught.value.got) == (name, value)

"""The policy losses by hand, importance weights, and the metrics of every loss."""

import math

import pytest
import torch

from mega_agentrl.actor.training.policy_loss import CLIP_METRICS, compute_policy_loss
from mega_agentrl.config.enums import PolicyLoss
from mega_agentrl.config.sections.algo import AlgoConfig

E = math.e
LOG_RATIO_RT = torch.tensor([[1.0, 0.0, 9.0], [-1.0, -1.0, 0.0]])
"""Row 0: ratios e and 1, the third token masked. Row 1: 1/e, 1/e, 1."""
ADVANTAGE_RT = torch.tensor([[2.0, 2.0, 99.0], [-1.0, -1.0, -1.0]])
MASK_RT = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
OLD_RT = torch.full((2, 3), -2.0)


def term(loss, correction_RT=None):
    """Return loss, metrics, and the gradient of the summed loss."""
    algo = AlgoConfig(loss=loss, clip_low=0.2, clip_high=0.3, clip_dual=1.5)
    logp_RT = (OLD_RT + LOG_RATIO_RT).requires_grad_()
    loss_RT, info = compute_policy_loss(algo, logp_RT, OLD_RT, ADVANTAGE_RT, MASK_RT, correction_RT)
    loss_RT.sum().backward()
    return loss_RT.detach(), info, logp_RT.grad


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        # Above the range and A > 0: the bound, no gradient. Below it and A < 0: the bound too.
        (PolicyLoss.clipped, [[-2.6, -2, 0], [0.8, 0.8, 1]], [[0, -2, 0], [0, 0, 1]]),
        # The same values; above the range the gradient keeps the factor 1.3.
        (PolicyLoss.balanced, [[-2.6, -2, 0], [0.8, 0.8, 1]], [[-2.6, -2, 0], [0, 0, 1]]),
        # Row 0: ratio exp(1/2) = 1.65 above 1.3. Row 1: exp(-2/3) = .51 below .8.
        (PolicyLoss.gspo, [[-2.6, -2.6, 0], [0.8, 0.8, 0.8]], [[0, 0, 0], [0, 0, 0]]),
        # Weights 1.3 and 1, .8, .8, 1 on the log-probs -1, -2 and -3, -3, -2.
        (PolicyLoss.cispo, [[2.6, 4, 0], [-2.4, -2.4, -2]], [[-2.6, -2, 0], [0.8, 0.8, 1]]),
    ],
)
def test_losses_by_hand(loss, value, gradient):
    loss_RT, _, gradient_RT = term(loss)
    torch.testing.assert_close(loss_RT, torch.tensor(value, dtype=torch.float32))
    torch.testing.assert_close(gradient_RT, torch.tensor(gradient, dtype=torch.float32))


@pytest.mark.parametrize("loss", PolicyLoss)
def test_every_loss_reports_the_same_figures(loss):
    _, info, _ = term(loss)
    assert tuple(info) == CLIP_METRICS
    assert all(value.ndim == 0 and not value.requires_grad for value in info.values())
    clipfrac = 1.0 if loss is PolicyLoss.gspo else 0.6
    assert float(info["clipfrac"]) == pytest.approx(clipfrac)
    assert float(info["approx_kl"]) == pytest.approx(1 / 5)
    assert float(info["clipfrac_lower"]) == 0


@pytest.mark.parametrize("loss", PolicyLoss)
def test_corrections_weigh_loss_and_gradient_of_each_token(loss):
    weight_RT = torch.tensor([[0.5, 0.0, torch.nan], [1.0, 2.0, 0.25]])
    kept_RT = weight_RT.masked_fill(~MASK_RT, 0.0)
    plain_RT, info, gradient_RT = term(loss)
    loss_RT, weighted_info, weighted_RT = term(loss, weight_RT)
    torch.testing.assert_close(loss_RT, plain_RT * kept_RT)
    assert weighted_info == info
    if loss is not PolicyLoss.gspo:  # where a token's loss pulls on the whole row
        torch.testing.assert_close(weighted_RT, gradient_RT * kept_RT)


def test_gspo_weighs_the_row_by_what_its_tokens_weigh():
    """Within the range: each of n tokens gets sum(w) * A * r / n."""
    algo = AlgoConfig(loss=PolicyLoss.gspo)
    logp_RT = (OLD_RT + 0.1 * LOG_RATIO_RT[:, :2].repeat(1, 2)[:, :3]).requires_grad_()
    weight_RT = torch.tensor([[0.5, 0.0, 9.0], [1.0, 2.0, 0.25]])
    loss_RT, _ = compute_policy_loss(algo, logp_RT, OLD_RT, ADVANTAGE_RT, MASK_RT, weight_RT)
    loss_RT.sum().backward()
    first, second = math.exp(0.05), math.exp(-0.1)
    expected_RT = torch.tensor(
        [[-0.5 * 2 * first / 2] * 2 + [0.0], [3.25 * 1 * second / 3] * 3], dtype=torch.float32
    )
    torch.testing.assert_close(logp_RT.grad, expected_RT)

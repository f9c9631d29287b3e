"""A policy loss of one's own: registered, worked by hand, and trained with.

For a run `algo.loss` must accept its name, too: one line in `config.enums.PolicyLoss`.
"""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.actor.training.objectives import PolicyObjective, compute_policy_loss
from mega_agentrl.actor.training.packing import pack_rows
from mega_agentrl.algo import policy_loss
from mega_agentrl.algo.masking import bounded_exp, masked_log_ratio, masked_mean, zero_masked
from mega_agentrl.config.sections.algo import AlgoConfig
from tests.parallel.reference import make_batch


@pytest.fixture(autouse=True)
def truncated(monkeypatch):
    """Register the loss for one test: truncated importance sampling, -A min(r, 1 + clip_high)."""
    monkeypatch.setattr(policy_loss, "LOSSES", dict(policy_loss.LOSSES))

    @policy_loss.register_loss("truncated", options=("clip_high",), metrics=("approx_kl",))
    def truncated(logp_BT, old_logp_BT, advantage_BT, mask_BT, *, clip_high):
        log_ratio_BT = masked_log_ratio(logp_BT, old_logp_BT, mask_BT)
        ratio_BT = bounded_exp(log_ratio_BT).clamp(max=1 + clip_high)
        loss_BT = -zero_masked(advantage_BT, mask_BT) * ratio_BT
        return loss_BT, {"approx_kl": masked_mean(-log_ratio_BT.detach(), mask_BT)}


def test_it_is_what_was_worked_out_by_hand():
    """Ratios 4 and 1 with A = 1, 1/2 with A = -1 and a masked token; the bound is 1.5."""
    ratio_RT = torch.tensor([[4.0, 1.0], [0.5, 99.0]])
    advantage_RT = torch.tensor([[1.0, 1.0], [-1.0, 99.0]])
    logp_RT = ratio_RT.log().requires_grad_()
    loss_RT, metrics = compute_policy_loss(
        AlgoConfig(loss="truncated", clip_high=0.5),
        logp_RT,
        torch.zeros(2, 2),
        advantage_RT,
        torch.tensor([[True, True], [True, False]]),
    )
    loss_RT.sum().backward()
    torch.testing.assert_close(loss_RT.detach(), torch.tensor([[-1.5, -1.0], [0.5, 0.0]]))
    torch.testing.assert_close(logp_RT.grad, torch.tensor([[0.0, -1.0], [0.5, 0.0]]))
    assert float(metrics["approx_kl"]) == pytest.approx(-math.log(2) / 3)


def test_a_step_of_it_follows_the_advantages():
    """Over micro-batches, with a table of logits as the policy."""
    batch = make_batch()
    num_tokens = int(batch.response_BT.max()) + 1
    logits_BTV = torch.zeros(*batch.response_BT.shape, num_tokens, requires_grad=True)

    def logps():
        return logits_BTV.log_softmax(-1).gather(-1, batch.response_BT[..., None]).squeeze(-1)

    old_BT = logps().detach()
    objective = PolicyObjective(
        AlgoConfig(loss="truncated"), batch.with_fields(old_logp_BT=old_BT), batch.mask_BT
    )
    for rows in ([4], [5, 0], [1, 2, 3]):
        micro = pack_rows(batch, rows, batch.mask_BT, torch.device("cpu"))
        loss, _ = objective(micro, logps()[rows], torch.zeros_like(old_BT[rows]))
        loss.backward()
    torch.optim.SGD([logits_BTV], lr=1.0).step()
    change_BT = logps().detach() - old_BT
    expected_BT = batch.advantage_BT.sign() * batch.mask_BT
    assert torch.equal(change_BT.sign(), expected_BT) and expected_BT.any()

"""Value, gradient and metrics of our losses, in the form in which they are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mega_agentrl.algo.policy_loss import aggregate
from tests.peers.random_batches import RandomBatch

RANGE = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = 3.0
LONGEST = 40
"""The longest possible response of the aggregation of Dr. GRPO."""


def value_and_gradient(
    batch: RandomBatch, loss: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return the loss as a function of the log-probs, and its gradient on unmasked tokens."""
    logp_BT = batch.logp_BT.clone().requires_grad_()
    value = loss(logp_BT)
    (gradient_BT,) = torch.autograd.grad(value, logp_BT)
    return [value.detach(), torch.where(batch.mask_BT, gradient_BT, 0.0)]


def our_loss(
    batch: RandomBatch, loss_of: Callable, mode: str, *, by_row: bool = False, **options: float
) -> list[torch.Tensor]:
    """Return value and gradient of a loss of `algo.policy_loss` with importance weights."""
    advantage = batch.advantage_BT[:, 0] if by_row else batch.advantage_BT

    def value(logp_BT: torch.Tensor) -> torch.Tensor:
        loss_BT, _ = loss_of(logp_BT, batch.old_logp_BT, advantage, batch.mask_BT, **options)
        weight_BT = torch.where(batch.mask_BT, batch.weight_BT, 0.0)
        return aggregate(loss_BT * weight_BT, batch.mask_BT, mode, max_response_tokens=LONGEST)

    return value_and_gradient(batch, value)

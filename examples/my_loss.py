"""A policy loss in one file (`algo.loss=examples/my_loss.py`): docs/own_algorithm.md."""

from typing import Annotated

import torch

from mega_agentrl.actor.training.losses import register_loss
from mega_agentrl.algo.masking import bounded_exp, masked_log_ratio, masked_mean, zero_masked
from mega_agentrl.config.ranges import Range


@register_loss(
    "truncated",
    metrics=("clipfrac", "approx_kl", "importance_ratio"),
    is_zero_without_advantage=True,
)
def loss(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    max_ratio: Annotated[float, Range(at_least=1)] = 1.2,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return truncated importance sampling, -A min(r, max_ratio), and its metrics."""
    log_ratio_BT = masked_log_ratio(logp_BT, old_logp_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT = -zero_masked(advantage_BT, mask_BT) * ratio_BT.clamp(max=max_ratio)
    return loss_BT, {
        "clipfrac": masked_mean((ratio_BT > max_ratio).float(), mask_BT),
        "approx_kl": masked_mean(-log_ratio_BT, mask_BT),
        "importance_ratio": masked_mean(ratio_BT, mask_BT),
    }

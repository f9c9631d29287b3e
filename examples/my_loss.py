"""A policy loss in one file (`algo.loss=examples/my_loss.py`): docs/own_algorithm.md."""

import torch

from mega_agentrl.algo.masking import bounded_exp, masked_log_ratio, masked_mean, zero_masked
from mega_agentrl.algo.policy_loss import register_loss


@register_loss(
    "truncated", options=("clip_high",), metrics=("clipfrac", "approx_kl", "importance_ratio")
)
def loss(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return truncated importance sampling, -A min(r, 1 + clip_high), and its metrics."""
    log_ratio_BT = masked_log_ratio(logp_BT, old_logp_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT = -zero_masked(advantage_BT, mask_BT) * ratio_BT.clamp(max=1 + clip_high)
    return loss_BT, {
        "clipfrac": masked_mean((ratio_BT > 1 + clip_high).float(), mask_BT),
        "approx_kl": masked_mean(-log_ratio_BT, mask_BT),
        "importance_ratio": masked_mean(ratio_BT, mask_BT),
    }

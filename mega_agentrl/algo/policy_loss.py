"""The clipped policy-gradient loss and how per-token losses become one number.

With r = exp(logp - old_logp), advantage A and clip range [1 - low, 1 + high] (PPO, arXiv
1707.06347):

    loss = max(-A r, -A clip(r))               and, for A < 0 with a dual clip c > 1
    loss = min(-A c, max(-A r, -A clip(r)))    (arXiv 1912.09729)

`balanced` is AEPO's clip (arXiv 2510.14545): above the range the bound is
(1 + high) r / sg(r), so the value is PPO's but the gradient keeps the factor 1 + high.

B trajectories, T response positions, float32 throughout. Nothing here knows how a batch was
cut: pass the global `denominator` and the values of the shards add up.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masking import masked_mean, masked_sum
from mega_agentrl.algo.shapes import same_shape

LOG_RATIO_BOUND = 20.0
MODES = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_sum_norm")


def clipped(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
    balanced: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[B, T] float32 loss, 0 where masked, and 0-d metrics over the unmasked positions.

    logp_BT, old_logp_BT: [B, T] log-probs now and at the start of the update, in nats.
    clip_low, clip_high: width of the clip range below and above 1. clip_dual: c, or None.
    Metrics: `clipfrac`, `clipfrac_lower` (shares of positions where the range, or the dual
    clip, decided) and `approx_kl`, mean of old_logp - logp.
    """
    same_shape(logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT)
    on_BT = mask_BT.bool()
    zero_BT = torch.zeros_like(logp_BT, dtype=torch.float32)
    log_ratio_BT = torch.where(on_BT, logp_BT.float() - old_logp_BT.float(), zero_BT)
    weight_BT = torch.where(on_BT, advantage_BT.float(), zero_BT)
    ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain_BT = -weight_BT * ratio_BT
    bounded_BT = -weight_BT * _bounded_ratio(ratio_BT, clip_low, clip_high, balanced=balanced)
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    lower_BT = torch.zeros_like(on_BT)
    if clip_dual is not None:
        ceiling_BT = -weight_BT * clip_dual
        lower_BT = (weight_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(lower_BT, ceiling_BT, loss_BT)
    info = {
        "clipfrac": masked_mean((bounded_BT > plain_BT).float(), on_BT),
        "clipfrac_lower": masked_mean(lower_BT.float(), on_BT),
        "approx_kl": masked_mean(-log_ratio_BT, on_BT),
    }
    return loss_BT, {name: value.detach() for name, value in info.items()}


def aggregate(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: str,
    *,
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """0-d float32: the per-token losses as one number.

    mode: `token_mean`, sum / tokens; `seq_mean_token_sum`, sum / trajectories;
    `seq_mean_token_mean`, sum of the trajectories' means / trajectories; `seq_sum_norm`,
    sum / T. denominator: what stands after the slash, counted over the whole batch, where
    `loss_BT` is a part of it; None counts it here. Wholly masked trajectories do not count.
    """
    same_shape(loss_BT=loss_BT, mask_BT=mask_BT)
    if denominator is None:
        denominator = count(mask_BT, mode)
    if mode == "seq_mean_token_mean":
        total = masked_mean(loss_BT.float(), mask_BT, dim=1).sum()
    else:
        total = masked_sum(loss_BT.float(), mask_BT)
    return total / denominator


def count(mask_BT: torch.Tensor, mode: str) -> torch.Tensor:
    """0-d float32: the denominator of `aggregate` for this mask, at least 1.

    Counts of shards add up to the count of the batch, except for `seq_sum_norm`, where it is
    the padded length T.
    """
    match mode:
        case "token_mean":
            number = mask_BT.bool().sum()
        case "seq_mean_token_sum" | "seq_mean_token_mean":
            number = mask_BT.bool().any(dim=1).sum()
        case "seq_sum_norm":
            number = torch.tensor(mask_BT.shape[1], device=mask_BT.device)
        case _:
            raise ValueError(f"mode={mode}: expected one of {', '.join(MODES)}")
    return number.clamp(min=1).float()


def _bounded_ratio(
    ratio_BT: torch.Tensor, clip_low: float, clip_high: float, *, balanced: bool
) -> torch.Tensor:
    if not balanced:
        return ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    above_BT = (1 + clip_high) * ratio_BT / ratio_BT.detach()
    return torch.where(ratio_BT > 1 + clip_high, above_BT, ratio_BT.clamp(min=1 - clip_low))

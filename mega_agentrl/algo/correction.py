"""Importance correction for tokens that another policy sampled than the one that is trained.

The engine that generates and the actor that trains run other kernels, and in asynchronous runs
other weights, so the log-probs of the same tokens differ. The weight of a token is the ratio

    w_t = exp(train_logp_t - rollout_logp_t)              level `token`
    w   = exp(sum over the trajectory of that exponent)   level `sequence`, the same on each token

kept from growing by `cap`: `truncated` takes min(w, cap), `masked` drops what is above, w = 0
(truncated importance sampling; the masked form). Weights carry no gradient: they multiply the
loss of a token.

How far the two are apart is `mismatch`. B trajectories, T response positions, nats.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masking import masked_mean, masked_sum
from mega_agentrl.algo.precision import widened
from mega_agentrl.algo.shapes import same_shape

LOG_RATIO_BOUND = 20.0
LEVELS = ("token", "sequence")
MODES = ("truncated", "masked")


def importance_weights(
    train_logp_BT: torch.Tensor,
    rollout_logp_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    level: str,
    mode: str,
    cap: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[B, T] weights, 0 where masked, and 0-d metrics over the unmasked positions.

    train_logp_BT, rollout_logp_BT: [B, T] of the sampled tokens. level: `token` or `sequence`.
    mode: `truncated` or `masked`. cap: largest weight, above 0. Metrics: those of `mismatch`,
    `weight_mean` (after the cap) and `capped`, the share of tokens whose ratio was above it.
    """
    same_shape(train_logp_BT=train_logp_BT, rollout_logp_BT=rollout_logp_BT, mask_BT=mask_BT)
    if level not in LEVELS or mode not in MODES or cap <= 0:
        raise ValueError(
            f"importance_weights: got level={level}, mode={mode}, cap={cap}; expected a level of "
            f"{', '.join(LEVELS)}, a mode of {', '.join(MODES)} and a cap above 0"
        )
    on_BT = mask_BT.bool()
    gap_BT = _gap(train_logp_BT, rollout_logp_BT, on_BT)
    exponent_BT = gap_BT if level == "token" else gap_BT.sum(1, keepdim=True).expand_as(gap_BT)
    ratio_BT = exponent_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    above_BT = ratio_BT > cap
    bound = cap if mode == "truncated" else 0.0
    weight_BT = torch.where(above_BT, bound, ratio_BT)
    weight_BT = torch.where(on_BT, weight_BT, torch.zeros_like(weight_BT))
    return weight_BT, mismatch(train_logp_BT, rollout_logp_BT, mask_BT) | {
        "weight_mean": masked_mean(weight_BT, on_BT),
        "capped": masked_mean(above_BT.float(), on_BT),
    }


def mismatch(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """0-d metrics of how far the two policies are apart, over the unmasked positions.

    `logp_mean_abs`, `logp_max_abs`: difference of log-probs, nats. `kl_k1`, `kl_k3`: estimates
    of KL(rollout || train) from rollout samples, nats per token. `ratio_mean`: 1 where the two
    agree. `ess`: effective sample size by token ratios, (sum w)^2 / (n sum w^2), 1 where they
    agree.
    """
    same_shape(train_logp_BT=train_logp_BT, rollout_logp_BT=rollout_logp_BT, mask_BT=mask_BT)
    on_BT = mask_BT.bool()
    gap_BT = _gap(train_logp_BT, rollout_logp_BT, on_BT)
    ratio_BT = gap_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    num_tokens = on_BT.sum().clamp(min=1)
    squares = masked_sum(ratio_BT.square(), on_BT)
    spread = masked_sum(ratio_BT, on_BT).square() / (num_tokens * squares)
    return {
        "logp_mean_abs": masked_mean(gap_BT.abs(), on_BT),
        "logp_max_abs": gap_BT.abs().max() if gap_BT.numel() else gap_BT.sum(),
        "kl_k1": masked_mean(-gap_BT, on_BT),
        "kl_k3": masked_mean(ratio_BT - 1 - gap_BT, on_BT),
        "ratio_mean": masked_mean(ratio_BT, on_BT),
        "ess": torch.where(squares > 0, spread, torch.zeros_like(spread)),
    }


def _gap(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, on_BT: torch.Tensor
) -> torch.Tensor:
    """Difference of the log-probs, without gradient; 0 where masked."""
    gap_BT = widened(train_logp_BT.detach()) - widened(rollout_logp_BT.detach())
    return torch.where(on_BT, gap_BT, torch.zeros_like(gap_BT))

"""The policy-gradient term of the objective, selected by `algo.loss` and weighted per token.

    loss_t = correction_t * l(logp_t, old_logp_t, A_t)

l is one of the formulas of `algo.policy_loss`. The correction weighs only this term, not the KL
term or the entropy bonus, and does not change any denominator. All losses report the same
metrics; a loss without a certain clip reports 0 for it.

gspo has one ratio per row and uses the mean advantage over the row's trained tokens, so it needs
whole rows with one advantage each; the config checks refuse settings that violate this.
Aggregation, KL term and entropy bonus are in `training.objectives`.

R rows of a micro-batch, T response positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch

from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.algo.policy_loss import cispo, clipped, gspo
from mega_agentrl.config.enums import PolicyLoss

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig

CLIP_METRICS = ("clipfrac", "clipfrac_lower", "approx_kl")


def compute_policy_loss(
    algo: AlgoConfig,
    logp_RT: torch.Tensor,
    old_logp_RT: torch.Tensor,
    advantage_RT: torch.Tensor,
    mask_RT: torch.Tensor,
    correction_RT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the policy loss of every token.

    Args:
        algo: Loss, clip ranges.
        logp_RT: `[R, T]` log-probs with gradient.
        old_logp_RT: `[R, T]` log-probs before the update.
        advantage_RT: `[R, T]`.
        mask_RT: `[R, T]` bool, the trained tokens.
        correction_RT: `[R, T]` weights without gradient; None weighs all tokens equally.

    Returns:
        `[R, T]` loss, 0 where masked, and the 0-d `CLIP_METRICS` over the trained tokens.
    """
    clip = {"clip_low": algo.clip_low, "clip_high": algo.clip_high}
    match algo.loss:
        case PolicyLoss.clipped | PolicyLoss.balanced:
            loss_RT, info = clipped(
                logp_RT,
                old_logp_RT,
                advantage_RT,
                mask_RT,
                **clip,
                clip_dual=algo.clip_dual,
                balanced=algo.loss is PolicyLoss.balanced,
            )
        case PolicyLoss.gspo:
            advantage_R = masked_mean(advantage_RT, mask_RT, dim=1)
            loss_RT, info = gspo(logp_RT, old_logp_RT, advantage_R, mask_RT, **clip)
        case PolicyLoss.cispo:
            loss_RT, info = cispo(logp_RT, old_logp_RT, advantage_RT, mask_RT, **clip)
        case _:
            assert_never(algo.loss)
    if correction_RT is not None:
        # Masked positions may hold NaN, so the weights are replaced instead of multiplied by 0.
        zero_RT = torch.zeros_like(correction_RT)
        loss_RT = loss_RT * torch.where(mask_RT.bool(), correction_RT, zero_RT)
    zero = loss_RT.new_zeros(())
    return loss_RT, {name: info.get(name, zero) for name in CLIP_METRICS}

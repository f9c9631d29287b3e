"""The policy-gradient part of the objective: `algo.loss` by name, weighted token by token.

    loss_t = correction_t * l(logp_t, old_logp_t, A_t)

l is one of the formulas of `algo.policy_loss`. The correction weighs only this part, neither KL
nor entropy bonus, and counts in no denominator. Every loss reports the same figures; one that
has no such clip reports 0.

gspo has one ratio a row and takes the mean advantage over the row's trained tokens, so it needs
rows that are whole and have one advantage: `config.check_algo` refuses the settings that break
this. Aggregation, KL and entropy are `loss`'s.

R rows of a micro-batch, T response positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch

from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.algo.policy_loss import cispo, clipped, gspo
from mega_agentrl.config.choices import PolicyLoss

if TYPE_CHECKING:
    from mega_agentrl.config.algo_schema import AlgoConfig

CLIP_METRICS = ("clipfrac", "clipfrac_lower", "approx_kl")


def policy_term(
    algo: AlgoConfig,
    logp_RT: torch.Tensor,
    old_logp_RT: torch.Tensor,
    advantage_RT: torch.Tensor,
    mask_RT: torch.Tensor,
    correction_RT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[R, T] loss, 0 where masked, and 0-d `CLIP_METRICS` over the unmasked positions.

    logp_RT, old_logp_RT, advantage_RT: [R, T] float. mask_RT: [R, T] bool. correction_RT: [R, T]
    float weights without gradient; None weighs all the same.
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
        # A masked position may hold anything, and 0 times NaN is no number.
        zero_RT = torch.zeros_like(correction_RT)
        loss_RT = loss_RT * torch.where(mask_RT.bool(), correction_RT, zero_RT)
    none = loss_RT.new_zeros(())
    return loss_RT, {name: info.get(name, none) for name in CLIP_METRICS}

"""Policy-gradient losses, and their aggregation to one number.

With r = exp(logp - old_logp), advantage A and clip range [1 - low, 1 + high]:

    clipped: max(-A r, -A clip(r))              (PPO, arXiv 1707.06347)
             min(-A c, the above)               for A < 0 with a dual clip c > 1 (arXiv 1912.09729)
    gspo:    clipped, with the ratio s r / sg(r), s = sg(exp(mean log-ratio of the trajectory))
             (GSPO-token, arXiv 2507.18071)
    atpo:    the same with the mean of the token's turn (arXiv 2601.04767)
    cispo:   -sg(clip(r)) A logp                (arXiv 2506.13585)
    future_kl: clipped, with A (1 + w sg(f)) in place of A, where f is the discounted product of
             this ratio and those after it      (arXiv 2603.19835, 2606.12384)

`balanced` selects AEPO's clip (arXiv 2510.14545): above the range the bound is (1 + high) r /
sg(r), which has PPO's value but keeps a gradient with the factor 1 + high. `dr_grpo` (arXiv
2503.20783) and `dapo` (arXiv 2503.14476) are `clipped` with their papers' clip range and
aggregation.

B trajectories, T response positions. Losses are float32, or float64 if the log-probs are float64.
They do not depend on how a batch is split: with the global `denominator` of `aggregate` the values
of the shards add up. The ratio of `gspo` and `atpo` has the value of the trajectory or turn, and
its gradient reaches the token alone, so that a weight of one token (`correction`) changes no other
token's gradient; where all weights are equal, the sum over the tokens has the same gradient as with
s itself. `gspo` needs whole trajectories and `atpo` whole turns, because their ratios
are means over a trajectory or turn; `future_kl` needs whole rows, because its factor depends on the
tokens to the right. In the formulas sg(x) is x without gradient.

`actor.training.losses` registers the losses that `algo.loss` can name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mega_agentrl.algo.advantage import apply_to_sampled_tokens, discounted_sum
from mega_agentrl.algo.masking import (
    bounded_exp,
    masked_log_ratio,
    masked_mean,
    masked_sum,
    number_turns,
    upcast,
    zero_masked,
)
from mega_agentrl.algo.shape_checks import check_same_rows, check_same_shape
from mega_agentrl.errors import InputError

AGGREGATION_MODES = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_sum_norm")
MEAN_LOG_RATIO_BOUND = 10.0
"""Largest mean log-ratio of a trajectory or turn, in nats; above it there is no gradient."""


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
    """Return the loss, [B, T] and 0 where masked, and 0-d metrics over the unmasked positions.

    Args:
        logp_BT: [B, T] current log-probs, nats.
        old_logp_BT: [B, T] log-probs at the start of the update, nats.
        advantage_BT: [B, T] advantages.
        mask_BT: [B, T] mask.
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.
        clip_dual: ratio c > 1 of the dual clip; None for no dual clip.
        balanced: whether to use AEPO's clip.

    Returns:
        The loss, and `clipfrac` and `clipfrac_lower`, the fractions of positions where the clip
        range or the dual clip was active, and `approx_kl`, the mean of old_logp - logp.
    """
    mask_BT, log_ratio_BT, advantage_BT = _masked_terms(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    clipped_ratio_BT = _clipped_ratio(ratio_BT, clip_low, clip_high, balanced=balanced)
    loss_BT, is_clipped_BT, is_dual_clipped_BT = _surrogate(
        ratio_BT, clipped_ratio_BT, advantage_BT, clip_dual
    )
    return loss_BT, {
        "clipfrac": masked_mean(is_clipped_BT.float(), mask_BT),
        "clipfrac_lower": masked_mean(is_dual_clipped_BT.float(), mask_BT),
        "approx_kl": masked_mean(-log_ratio_BT.detach(), mask_BT),
    }


def gspo(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and metrics like `clipped`, with one ratio for all tokens of a trajectory.

    `seq_mean_token_mean` gives the paper's objective. Rows must be whole trajectories: the mean
    over a part is another ratio.

    Args:
        logp_BT: [B, T] current log-probs, nats.
        old_logp_BT: [B, T] log-probs at the start of the update, nats.
        advantage_B: [B] advantage of each trajectory.
        mask_BT: [B, T] mask.
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.

    Returns:
        The loss, [B, T], and `clipfrac` (fraction of tokens in clipped trajectories) and
        `approx_kl`.
    """
    check_same_shape(logp_BT=logp_BT, old_logp_BT=old_logp_BT, mask_BT=mask_BT)
    check_same_rows(advantage_B, mask_BT)
    mask_BT = mask_BT.bool()
    log_ratio_BT = masked_log_ratio(logp_BT, old_logp_BT, mask_BT)
    mean_B1 = masked_mean(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)
    advantage_BT = advantage_B.unsqueeze(1).expand_as(mask_BT)
    advantage_BT = zero_masked(advantage_BT.to(log_ratio_BT.dtype), mask_BT)
    return _clipped_mean_ratio(mean_B1, log_ratio_BT, advantage_BT, mask_BT, clip_low, clip_high)


def atpo(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and metrics like `clipped`, with one ratio for all tokens of a turn.

    A turn is a run of unmasked tokens. As in the code that was released with the paper, the
    gradient of a ratio reaches its token alone, so that the advantages of a turn's tokens may
    differ.

    Args:
        logp_BT: [B, T] current log-probs, nats.
        old_logp_BT: [B, T] log-probs at the start of the update, nats.
        advantage_BT: [B, T] advantages.
        mask_BT: [B, T] mask.
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.

    Returns:
        The loss, [B, T], and `clipfrac` (fraction of tokens in clipped turns) and `approx_kl`.
    """
    mask_BT, log_ratio_BT, advantage_BT = _masked_terms(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    mean_BT = _turn_means(log_ratio_BT.detach(), mask_BT)
    return _clipped_mean_ratio(mean_BT, log_ratio_BT, advantage_BT, mask_BT, clip_low, clip_high)


def cispo(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss -sg(clip(r)) A logp, [B, T] and 0 where masked, and 0-d metrics.

    The clipped ratio is a constant weight, so no token loses its gradient. The arguments are those
    of `clipped`.

    Returns:
        The loss, and `clipfrac`, the fraction of tokens clipped on either side, and `approx_kl`.
    """
    mask_BT, log_ratio_BT, advantage_BT = _masked_terms(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT.detach())
    weight_BT = _clipped_ratio(ratio_BT, clip_low, clip_high, balanced=False)
    return -weight_BT * advantage_BT * zero_masked(logp_BT.to(log_ratio_BT.dtype), mask_BT), {
        "clipfrac": masked_mean((weight_BT != ratio_BT).float(), mask_BT),
        "approx_kl": masked_mean(-log_ratio_BT.detach(), mask_BT),
    }


def future_kl(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
    gamma: float,
    bound: float,
    high_only: bool,
    weight: float,
    max_penalized_ratio: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and metrics like `clipped`, with advantages that grow with the future ratio.

        A_t (1 + weight f_t),  f_t = clip(exp(sum_{k >= t} gamma^(k - t) m_k log r_k))

    m_k is 0 where r_k is above `clip_dual`, else 1, and f has no gradient (arXiv 2603.19835,
    2606.12384). Before the first update all ratios are 1, and so is f. Where A < 0 and r is above
    `max_penalized_ratio`, f is clipped to [0.8, 1]. A row with more than one token at the dual clip
    has no loss, but its tokens still count in the denominator. The code that was released with APPO
    differs in two points: such tokens do not count, and masked tokens discount.

    Args:
        logp_BT: [B, T] current log-probs, nats.
        old_logp_BT: [B, T] log-probs at the start of the update, nats.
        advantage_BT: [B, T] advantages.
        mask_BT: [B, T] mask.
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.
        clip_dual: ratio c > 1 of the dual clip.
        gamma: discount per unmasked token.
        bound: f is between 1 - `bound` and 1 + `bound`.
        high_only: whether the lower bound of f is 1 instead of 1 - `bound`.
        weight: weight of f.
        max_penalized_ratio: ratio above which f does not add to a negative advantage.

    Returns:
        The loss, [B, T], the metrics of `clipped`, and `future_weight`, the mean of f.
    """
    mask_BT, log_ratio_BT, advantage_BT = _masked_terms(logp_BT, old_logp_BT, advantage_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    constant_BT = log_ratio_BT.detach()
    sum_BT = apply_to_sampled_tokens(
        lambda ratio_RL: discounted_sum(ratio_RL, gamma),
        mask_BT,
        constant_BT.masked_fill(constant_BT > math.log(clip_dual), 0.0),
    )
    future_BT = bounded_exp(sum_BT).clamp(1.0 if high_only else 1 - bound, 1 + bound)
    future_BT = zero_masked(future_BT.to(constant_BT.dtype), mask_BT)
    is_capped_BT = (advantage_BT < 0) & (ratio_BT.detach() > max_penalized_ratio)
    future_BT = torch.where(is_capped_BT, future_BT.clamp(0.8, 1.0), future_BT)
    loss_BT, is_clipped_BT, is_dual_clipped_BT = _surrogate(
        ratio_BT,
        _clipped_ratio(ratio_BT, clip_low, clip_high, balanced=False),
        advantage_BT * (1 + weight * future_BT),
        clip_dual,
    )
    is_dropped_B = is_dual_clipped_BT.sum(dim=1) > 1
    return loss_BT.masked_fill(is_dropped_B.unsqueeze(1), 0.0), {
        "clipfrac": masked_mean(is_clipped_BT.float(), mask_BT),
        "clipfrac_lower": masked_mean(is_dual_clipped_BT.float(), mask_BT),
        "approx_kl": masked_mean(-constant_BT, mask_BT),
        "future_weight": masked_mean(future_BT, mask_BT),
    }


@dataclass(frozen=True, slots=True)
class LossPreset:
    """`clipped` with the clip range and the aggregation of a paper; call it for the loss."""

    clip_low: float
    """Width of the clip range below 1."""
    clip_high: float
    """Width of the clip range above 1."""
    aggregation: str
    """Mode of `aggregate`."""
    norm_by_std: bool
    """Argument of `advantage.grpo` that belongs to the preset."""

    def __call__(
        self,
        logp_BT: torch.Tensor,
        old_logp_BT: torch.Tensor,
        advantage_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        *,
        denominator: float | torch.Tensor | None = None,
        max_response_tokens: int | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the 0-d loss, aggregated as by `aggregate`, and the metrics of `clipped`."""
        loss_BT, info = clipped(
            logp_BT,
            old_logp_BT,
            advantage_BT,
            mask_BT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        loss = aggregate(
            loss_BT,
            mask_BT,
            self.aggregation,
            denominator=denominator,
            max_response_tokens=max_response_tokens,
        )
        return loss, info


dr_grpo = LossPreset(clip_low=0.2, clip_high=0.2, aggregation="seq_sum_norm", norm_by_std=False)
"""Dr. GRPO (arXiv 2503.20783)."""
dapo = LossPreset(clip_low=0.2, clip_high=0.28, aggregation="token_mean", norm_by_std=True)
"""DAPO (arXiv 2503.14476)."""


def aggregate(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: str,
    *,
    denominator: float | torch.Tensor | None = None,
    max_response_tokens: int | None = None,
    num_tokens_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the per-token losses as one 0-d number, in the precision of the losses.

    Args:
        loss_BT: [B, T] per-token losses.
        mask_BT: [B, T] mask; fully masked trajectories do not count.
        mode: `token_mean`, sum / unmasked tokens; `seq_mean_token_sum`, sum / trajectories;
            `seq_mean_token_mean`, sum of the trajectories' means / trajectories; `seq_sum_norm`,
            sum / (trajectories * `max_response_tokens`).
        denominator: `loss_denominator` of the whole batch, if `loss_BT` is a shard of it or a
            trajectory may be several rows; None to compute it from `mask_BT`.
        max_response_tokens: The constant of `seq_sum_norm`, if there is no `denominator`.
        num_tokens_B: [B] unmasked tokens of each row's whole trajectory, if a trajectory may be
            several rows; only `seq_mean_token_mean` reads it.
    """
    check_same_shape(loss_BT=loss_BT, mask_BT=mask_BT)
    if denominator is None:
        denominator = loss_denominator(mask_BT, mode, max_response_tokens=max_response_tokens)
    if mode != "seq_mean_token_mean":
        return masked_sum(upcast(loss_BT), mask_BT) / denominator
    if num_tokens_B is None:
        num_tokens_B = mask_BT.bool().sum(dim=1)
    sum_B = masked_sum(upcast(loss_BT), mask_BT, dim=1)
    return (sum_B / num_tokens_B.clamp(min=1)).sum() / denominator


def loss_denominator(
    mask_BT: torch.Tensor,
    mode: str,
    *,
    max_response_tokens: int | None = None,
    trajectory_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the divisor of `aggregate` for this mask, 0-d float32, above 0.

    The divisors of shards of whole trajectories add up to that of the batch.

    Args:
        mask_BT: [B, T] mask.
        mode: Mode of `aggregate`.
        max_response_tokens: Longest possible response, by whose length `seq_sum_norm` divides, so
            that a token weighs the same in every batch (Dr. GRPO, arXiv 2503.20783).
        trajectory_B: [B] int64 trajectory of each row; None if each row is one.

    Raises:
        ValueError: The mode is unknown, or `seq_sum_norm` has no `max_response_tokens`.
    """
    if mode == "token_mean":
        return mask_BT.bool().sum().clamp(min=1).float()
    if mode not in AGGREGATION_MODES:
        raise InputError("mode", mode, f"one of {', '.join(AGGREGATION_MODES)}")
    is_trained_B = mask_BT.bool().any(dim=1)
    count = is_trained_B.sum()
    if trajectory_B is not None:
        count = torch.tensor(
            torch.unique(trajectory_B[is_trained_B]).numel(), device=mask_BT.device
        )
    number = count.clamp(min=1).float()
    if mode != "seq_sum_norm":
        return number
    if max_response_tokens is None or max_response_tokens < 1:
        expected = "the longest possible response in tokens, at least 1, with seq_sum_norm"
        raise InputError("max_response_tokens", max_response_tokens, expected)
    return number * max_response_tokens


def _masked_terms(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the bool mask, the log-ratio and the advantage, the last two 0 where masked."""
    check_same_shape(
        logp_BT=logp_BT, old_logp_BT=old_logp_BT, advantage_BT=advantage_BT, mask_BT=mask_BT
    )
    mask_BT = mask_BT.bool()
    log_ratio_BT = masked_log_ratio(logp_BT, old_logp_BT, mask_BT)
    return mask_BT, log_ratio_BT, zero_masked(advantage_BT.to(log_ratio_BT.dtype), mask_BT)


def _clipped_mean_ratio(
    mean_BT: torch.Tensor,
    log_ratio_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the clipped loss with ratios sg(exp(mean)) r / sg(r), and its metrics.

    Args:
        mean_BT: [B, T] mean log-ratio of each token's trajectory or turn, or [B, 1].
        log_ratio_BT: [B, T] log-ratios, 0 where masked.
        advantage_BT: [B, T] advantages, 0 where masked.
        mask_BT: [B, T] bool mask.
        clip_low: width of the clip range below 1.
        clip_high: width of the clip range above 1.
    """
    constant_BT = log_ratio_BT.detach()
    exponent_BT = mean_BT.detach() + (log_ratio_BT - constant_BT)
    ratio_BT = bounded_exp(exponent_BT.clamp(max=MEAN_LOG_RATIO_BOUND))
    clipped_ratio_BT = _clipped_ratio(ratio_BT, clip_low, clip_high, balanced=False)
    loss_BT, is_clipped_BT, _ = _surrogate(ratio_BT, clipped_ratio_BT, advantage_BT, None)
    return loss_BT, {
        "clipfrac": masked_mean(is_clipped_BT.float(), mask_BT),
        "approx_kl": masked_mean(-constant_BT, mask_BT),
    }


def _turn_means(x_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean of `x_BT` over the turn of each unmasked token; `x_BT` is 0 where masked."""
    turn_BT = number_turns(mask_BT).clamp(min=0)
    total_BT = torch.zeros_like(x_BT).scatter_add(1, turn_BT, x_BT)
    count_BT = torch.zeros_like(x_BT).scatter_add(1, turn_BT, mask_BT.to(x_BT.dtype))
    return (total_BT / count_BT.clamp(min=1)).gather(1, turn_BT)


def _clipped_ratio(
    ratio_BT: torch.Tensor, clip_low: float, clip_high: float, *, balanced: bool
) -> torch.Tensor:
    """Return clip(r), with AEPO's upper bound, which keeps a gradient, if `balanced`."""
    if not balanced:
        return ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    upper_bound_BT = (1 + clip_high) * ratio_BT / ratio_BT.detach()
    return torch.where(ratio_BT > 1 + clip_high, upper_bound_BT, ratio_BT.clamp(min=1 - clip_low))


def _surrogate(
    ratio_BT: torch.Tensor,
    clipped_ratio_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    clip_dual: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return max(-A r, -A clip(r)) with the dual clip, and the masks of where each clip is active.

    Args:
        ratio_BT: [B, T] ratios.
        clipped_ratio_BT: The ratios after the clip range, of the same shape.
        advantage_BT: [B, T] advantages.
        clip_dual: ratio c > 1 of the dual clip; None for no dual clip.

    Returns:
        The loss, and [B, T] bool masks for the clip range and for the dual clip.
    """
    unclipped_loss_BT = -advantage_BT * ratio_BT
    clipped_loss_BT = -advantage_BT * clipped_ratio_BT
    loss_BT = torch.maximum(unclipped_loss_BT, clipped_loss_BT)
    is_dual_clipped_BT = torch.zeros_like(advantage_BT, dtype=torch.bool)
    if clip_dual is not None:
        ceiling_BT = -advantage_BT * clip_dual
        is_dual_clipped_BT = (advantage_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(is_dual_clipped_BT, ceiling_BT, loss_BT)
    return loss_BT, clipped_loss_BT > unclipped_loss_BT, is_dual_clipped_BT

"""Importance correction for tokens sampled by another policy than the one being trained.

The inference engine and the trainer run different kernels and, in asynchronous runs, different
weights, so their log-probs of the same tokens differ. The weight of a token is the ratio

    w_t = exp(train_logp_t - rollout_logp_t)           level `token`
    w   = exp(sum_t (train_logp_t - rollout_logp_t))   level `sequence`, the same for all tokens

bounded by `cap`: mode `truncated` takes min(w, cap) (truncated importance sampling, Ionides 2008),
mode `masked` sets w = 0 above the cap. The weights carry no gradient and multiply the token's loss.
`logprob_mismatch` measures how much the two policies differ.

B trajectories, T response positions, R rows of a chunk; log-probs in nats.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masking import (
    bounded_exp,
    masked_log_ratio,
    row_chunks,
    upcast,
    zero_masked,
)
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.errors import InputError

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
    """Return weights, [B, T] and 0 where masked, and 0-d metrics over the unmasked positions.

    Args:
        train_logp_BT: [B, T] log-probs of the sampled tokens under the trained policy.
        rollout_logp_BT: [B, T] log-probs of the same tokens from the engine.
        mask_BT: [B, T] mask.
        level: `token` or `sequence`.
        mode: `truncated` or `masked`.
        cap: largest weight, above 0.

    Returns:
        The weights, and the metrics of `logprob_mismatch` plus `weight_mean` (after the cap) and
        `capped_fraction`, the fraction of tokens whose ratio was above the cap.

    Raises:
        ValueError: level, mode or cap is unknown or out of range.
    """
    check_same_shape(train_logp_BT=train_logp_BT, rollout_logp_BT=rollout_logp_BT, mask_BT=mask_BT)
    if level not in LEVELS:
        raise InputError("level", level, f"one of {', '.join(LEVELS)}")
    if mode not in MODES:
        raise InputError("mode", mode, f"one of {', '.join(MODES)}")
    if cap <= 0:
        raise InputError("cap", cap, "above 0")
    capped_weight = cap if mode == "truncated" else 0.0
    weights, sums, weight_sums = [], [], []
    for train_RT, rollout_RT, mask_RT in row_chunks(train_logp_BT, rollout_logp_BT, mask_BT):
        mask_RT = mask_RT.bool()
        log_ratio_RT = masked_log_ratio(train_RT.detach(), rollout_RT.detach(), mask_RT)
        token_ratio_RT = bounded_exp(log_ratio_RT)
        prob_diff_RT = _prob_abs_diff(train_RT, rollout_RT, mask_RT)
        sums.append(_mismatch_sums(log_ratio_RT, token_ratio_RT, prob_diff_RT, mask_RT))
        ratio_RT = token_ratio_RT
        if level == "sequence":
            ratio_RT = bounded_exp(log_ratio_RT.sum(1, keepdim=True))
        is_capped_RT = (ratio_RT > cap) & mask_RT
        weights.append(
            torch.where(is_capped_RT, capped_weight, torch.where(mask_RT, ratio_RT, 0.0))
        )
        weight_sums.append(torch.stack([_sum_float64(weights[-1]), _sum_float64(is_capped_RT)]))
    weight_BT = torch.cat(weights)
    weight_sum, num_capped = torch.stack(weight_sums).sum(0).to(weight_BT.dtype)
    num_tokens = mask_BT.bool().sum().clamp(min=1)
    return weight_BT, _mismatch_metrics(sums, weight_BT.dtype) | {
        "weight_mean": weight_sum / num_tokens,
        "capped_fraction": num_capped / num_tokens,
    }


def logprob_mismatch(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return 0-d metrics of the difference between the two policies over unmasked positions.

    Returns:
        `logp_mean_abs`, `logp_max_abs`: absolute difference of the log-probs, nats.
            `prob_mean_abs`, `prob_max_abs`, `prob_std_abs`: mean, maximum and standard deviation
            (divided by n) of |exp(rollout_logp) - exp(train_logp)|. `kl_k1`, `kl_k3`: estimates of
            KL(rollout || train), nats per token. `ratio_mean`: mean importance ratio. `ess`:
            effective sample size of the token ratios, (sum w)^2 / (n sum w^2). The last two are 1
            if the policies agree.
    """
    check_same_shape(train_logp_BT=train_logp_BT, rollout_logp_BT=rollout_logp_BT, mask_BT=mask_BT)
    sums = []
    for train_RT, rollout_RT, mask_RT in row_chunks(train_logp_BT, rollout_logp_BT, mask_BT):
        mask_RT = mask_RT.bool()
        log_ratio_RT = masked_log_ratio(train_RT.detach(), rollout_RT.detach(), mask_RT)
        prob_diff_RT = _prob_abs_diff(train_RT, rollout_RT, mask_RT)
        sums.append(_mismatch_sums(log_ratio_RT, bounded_exp(log_ratio_RT), prob_diff_RT, mask_RT))
    return _mismatch_metrics(sums, log_ratio_RT.dtype)


def _sum_float64(values_RT: torch.Tensor) -> torch.Tensor:
    return values_RT.sum(dtype=torch.float64)


def _mismatch_sums(
    log_ratio_RT: torch.Tensor,
    ratio_RT: torch.Tensor,
    prob_diff_RT: torch.Tensor,
    mask_RT: torch.Tensor,
) -> torch.Tensor:
    """Return the [9] float64 statistics of a chunk of rows that `_mismatch_metrics` combines.

    The first seven are sums, the last two maxima. At a masked position the log-ratio is 0, the
    ratio 1 and the difference of the probabilities 0.
    """
    abs_log_ratio_RT = log_ratio_RT.abs()
    num_tokens = _sum_float64(mask_RT)
    num_masked = mask_RT.numel() - num_tokens
    return torch.stack(
        [
            num_tokens,
            _sum_float64(abs_log_ratio_RT),
            _sum_float64(log_ratio_RT),
            _sum_float64(ratio_RT) - num_masked,
            _sum_float64(ratio_RT.square()) - num_masked,
            _sum_float64(prob_diff_RT),
            _sum_float64(prob_diff_RT.double().square()),
            _max_float64(abs_log_ratio_RT),
            _max_float64(prob_diff_RT),
        ]
    )


def _max_float64(values_RT: torch.Tensor) -> torch.Tensor:
    return values_RT.amax().double() if values_RT.numel() else values_RT.new_zeros(()).double()


def _mismatch_metrics(sums: list[torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the metrics of `logprob_mismatch` from the statistics of all chunks."""
    statistics = torch.stack(sums)
    num_tokens, abs_log_ratio, log_ratio, ratio, squares, prob_diff, prob_diff_squares, _, _ = (
        statistics.sum(0)
    )
    count = num_tokens.clamp(min=1)
    ess = ratio.square() / (count * squares)
    # The two terms nearly cancel: rounding can make the difference negative even in float64.
    variance = (prob_diff_squares / count - (prob_diff / count).square()).clamp(min=0)
    logp_max, prob_max = statistics[:, -2:].amax(0)
    metrics = {
        "logp_mean_abs": abs_log_ratio / count,
        "logp_max_abs": logp_max,
        "prob_mean_abs": prob_diff / count,
        "prob_max_abs": prob_max,
        "prob_std_abs": variance.sqrt(),
        "kl_k1": -log_ratio / count,
        "kl_k3": (ratio - num_tokens - log_ratio) / count,
        "ratio_mean": ratio / count,
        "ess": torch.where(squares > 0, ess, 0.0),
    }
    return {name: value.to(dtype) for name, value in metrics.items()}


def _prob_abs_diff(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the absolute difference of the probabilities without gradient, 0 where masked."""
    rollout_BT, train_BT = (
        upcast(logp_BT.detach()).exp() for logp_BT in (rollout_logp_BT, train_logp_BT)
    )
    return zero_masked((rollout_BT - train_BT).abs(), mask_BT)

"""Importance correction for tokens that another policy sampled than the one that is trained.

The engine that generates and the actor that trains run other kernels, and in asynchronous runs
other weights, so the log-probs of the same tokens differ. The weight of a token is the ratio

    w_t = exp(train_logp_t - rollout_logp_t)              level `token`
    w   = exp(sum over the trajectory of that exponent)   level `sequence`, the same on each token

kept from growing by `cap`: `truncated` takes min(w, cap), `masked` drops what is above, w = 0
(truncated importance sampling; the masked form). Weights carry no gradient: they multiply the
loss of a token.

How far the two are apart, in log-probs and in probabilities, is `mismatch`.

B trajectories, T response positions, nats.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.precision import widened
from mega_agentrl.algo.scan import row_parts
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
    bound = cap if mode == "truncated" else 0.0
    weights, sums, kept = [], [], []
    for train_RT, rollout_RT, mask_RT in row_parts(train_logp_BT, rollout_logp_BT, mask_BT):
        on_RT = mask_RT.bool()
        gap_RT = _gap(train_RT, rollout_RT, on_RT)
        token_ratio_RT = _ratio(gap_RT)
        probs_RT = _prob_gap(train_RT, rollout_RT, on_RT)
        sums.append(_sums(gap_RT, token_ratio_RT, probs_RT, on_RT))
        ratio_RT = token_ratio_RT
        if level == "sequence":
            ratio_RT = _ratio(gap_RT.sum(1, keepdim=True))
        above_RT = (ratio_RT > cap) & on_RT
        weights.append(torch.where(above_RT, bound, torch.where(on_RT, ratio_RT, 0.0)))
        kept.append(torch.stack([_total(weights[-1]), _total(above_RT)]))
    weight_BT = torch.cat(weights)
    weight_sum, num_above = torch.stack(kept).sum(0).to(weight_BT.dtype)
    num_tokens = mask_BT.bool().sum().clamp(min=1)
    return weight_BT, _figures(sums, weight_BT.dtype) | {
        "weight_mean": weight_sum / num_tokens,
        "capped": num_above / num_tokens,
    }


def mismatch(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> dict[str, torch.Tensor]:
    """0-d metrics of how far the two policies are apart, over the unmasked positions.

    `logp_mean_abs`, `logp_max_abs`: difference of log-probs, nats. `prob_mean_abs`,
    `prob_max_abs`, `prob_std_abs`: |exp(rollout_logp) - exp(train_logp)|, its mean, largest value
    and standard deviation over these positions (by n, not n - 1). `kl_k1`, `kl_k3`: estimates
    of KL(rollout || train) from rollout samples, nats per token. `ratio_mean`: 1 where the two
    agree. `ess`: effective sample size by token ratios, (sum w)^2 / (n sum w^2), 1 where they
    agree.
    """
    same_shape(train_logp_BT=train_logp_BT, rollout_logp_BT=rollout_logp_BT, mask_BT=mask_BT)
    sums = []
    for train_RT, rollout_RT, mask_RT in row_parts(train_logp_BT, rollout_logp_BT, mask_BT):
        on_RT = mask_RT.bool()
        gap_RT = _gap(train_RT, rollout_RT, on_RT)
        probs_RT = _prob_gap(train_RT, rollout_RT, on_RT)
        sums.append(_sums(gap_RT, _ratio(gap_RT), probs_RT, on_RT))
    return _figures(sums, gap_RT.dtype)


def _ratio(exponent: torch.Tensor) -> torch.Tensor:
    return exponent.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _total(values_RT: torch.Tensor) -> torch.Tensor:
    return values_RT.sum(dtype=torch.float64)


def _sums(
    gap_RT: torch.Tensor, ratio_RT: torch.Tensor, probs_RT: torch.Tensor, on_RT: torch.Tensor
) -> torch.Tensor:
    """[9] float64 of some rows: what `_figures` is made of, the largest gaps in the last places.

    A masked position has gap 0, ratio 1 and a difference of probabilities of 0.
    """
    away_RT = gap_RT.abs()
    num = _total(on_RT)
    num_off = on_RT.numel() - num
    return torch.stack(
        [
            num,
            _total(away_RT),
            _total(gap_RT),
            _total(ratio_RT) - num_off,
            _total(ratio_RT.square()) - num_off,
            _total(probs_RT),
            _total(probs_RT.double().square()),
            _largest(away_RT),
            _largest(probs_RT),
        ]
    )


def _largest(values_RT: torch.Tensor) -> torch.Tensor:
    return values_RT.amax().double() if values_RT.numel() else values_RT.new_zeros(()).double()


def _figures(sums: list[torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    table = torch.stack(sums)
    num, away, gap, ratio, squares, probs, prob_squares, _, _ = table.sum(0)
    count = num.clamp(min=1)
    spread = ratio.square() / (count * squares)
    # In float64, as the two nearly cancel; by rounding still below 0 at times.
    variance = (prob_squares / count - (probs / count).square()).clamp(min=0)
    logp_max, prob_max = table[:, -2:].amax(0)
    figures = {
        "logp_mean_abs": away / count,
        "logp_max_abs": logp_max,
        "prob_mean_abs": probs / count,
        "prob_max_abs": prob_max,
        "prob_std_abs": variance.sqrt(),
        "kl_k1": -gap / count,
        "kl_k3": (ratio - num - gap) / count,
        "ratio_mean": ratio / count,
        "ess": torch.where(squares > 0, spread, 0.0),
    }
    return {name: value.to(dtype) for name, value in figures.items()}


def _gap(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, on_BT: torch.Tensor
) -> torch.Tensor:
    """Difference of the log-probs, without gradient; 0 where masked."""
    gap_BT = widened(train_logp_BT.detach()) - widened(rollout_logp_BT.detach())
    return torch.where(on_BT, gap_BT, torch.zeros_like(gap_BT))


def _prob_gap(
    train_logp_BT: torch.Tensor, rollout_logp_BT: torch.Tensor, on_BT: torch.Tensor
) -> torch.Tensor:
    """|difference| of the probabilities, without gradient; 0 where masked."""
    rollout_BT, train_BT = (
        widened(logp_BT.detach()).exp() for logp_BT in (rollout_logp_BT, train_logp_BT)
    )
    gap_BT = (rollout_BT - train_BT).abs()
    return torch.where(on_BT, gap_BT, torch.zeros_like(gap_BT))

"""Log-prob, entropy and their gradients of a softmax whose columns are processed in parts.

For its part of the columns a pass keeps four float64 numbers per token. With l = logit /
temperature and t the target's l they are

    MAX       m = max l
    SUM       S = sum exp(l - m)
    WEIGHTED  W = sum exp(l - m) (l - m)
    TARGET    t, or -inf if another part holds the target

Parts, which are blocks of one rank's columns or whole ranks, are merged: with m over all parts
and s = m_part - m,  S = sum e^s S_part,  W = sum e^s (W_part + s S_part). Then

    logp = (t - m) - log S          H = log S - W / S

The maximum is subtracted from every logit first, so logits of 1e4 cost no precision. With g and h
the gradients of logp and H, p = exp(l - m) / S and log p = (l - m) - log S:

    dl_j = g 1[j = target] - p_j (g + h (log p_j + H))

which a kernel evaluates as  target_coef 1[j = target] - e (prob_coef + entropy_coef x),
x = l_j - m, e = exp(x), with three coefficients per token (`LogitGradCoefficients`).

Shape suffixes: N (or C) tokens, K parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MAX, SUM, WEIGHTED, TARGET = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxStats:
    """Statistics of each token that the backward pass needs, `[N]` float64."""

    max_logit_N: torch.Tensor
    """m, the largest logit divided by the temperature."""
    log_sum_exp_N: torch.Tensor
    """log S."""
    entropy_N: torch.Tensor
    """H in nats."""
    valid_N: torch.Tensor
    """bool, False for ignored tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGradCoefficients:
    """Coefficients of the gradient of a token's raw logits, `[N]` in the compute dtype.

    The gradient is target_coef 1[j = target] - e (prob_coef + entropy_coef x), with
    x = (raw - max_raw_logit) / temperature and e = exp(x).
    """

    max_raw_logit_N: torch.Tensor
    """Largest logit before the division by the temperature."""
    prob_coef_N: torch.Tensor
    entropy_coef_N: torch.Tensor | None
    """None if the entropy has no gradient."""
    target_coef_N: torch.Tensor

    def slice_tokens(self, tokens: slice) -> LogitGradCoefficients:
        """Return the coefficients of a slice of the tokens."""
        return LogitGradCoefficients(
            max_raw_logit_N=self.max_raw_logit_N[tokens],
            prob_coef_N=self.prob_coef_N[tokens],
            entropy_coef_N=None if self.entropy_coef_N is None else self.entropy_coef_N[tokens],
            target_coef_N=self.target_coef_N[tokens],
        )


def empty_stats(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the `[4, N]` float64 statistics of a part without columns."""
    stats_4N = torch.zeros(4, num_tokens, dtype=torch.float64, device=device)
    stats_4N[MAX] = stats_4N[TARGET] = -torch.inf
    return stats_4N


def merge_stats(stats_K4N: torch.Tensor) -> torch.Tensor:
    """Merge the `[K, 4, N]` float64 statistics of K parts into `[4, N]`."""
    max_N = stats_K4N[:, MAX].amax(dim=0)
    # A part without columns has -inf here. At -1000 its weight is 0 as well, without the NaN
    # of 0 * inf.
    shift_KN = (stats_K4N[:, MAX] - max_N).clamp_(min=-1000.0)
    scale_KN = shift_KN.exp()
    sum_KN = stats_K4N[:, SUM]
    return torch.stack(
        [
            max_N,
            (scale_KN * sum_KN).sum(dim=0),
            (scale_KN * (stats_K4N[:, WEIGHTED] + shift_KN * sum_KN)).sum(dim=0),
            stats_K4N[:, TARGET].amax(dim=0),
        ]
    )


def logp_entropy_from_stats(
    stats_4N: torch.Tensor,
    valid_N: torch.Tensor,
    log: Callable[[torch.Tensor], torch.Tensor] = torch.log,
) -> tuple[torch.Tensor, torch.Tensor, SoftmaxStats]:
    """Return `[N]` float64 log-prob and entropy, 0 for invalid tokens, and the statistics.

    `log` computes the logarithm of the sums.
    """
    log_sum_N = log(stats_4N[SUM])
    entropy_N = log_sum_N - stats_4N[WEIGHTED] / stats_4N[SUM]
    logp_N = (stats_4N[TARGET] - stats_4N[MAX]) - log_sum_N
    softmax = SoftmaxStats(
        max_logit_N=stats_4N[MAX], log_sum_exp_N=log_sum_N, entropy_N=entropy_N, valid_N=valid_N
    )
    return logp_N.masked_fill(~valid_N, 0.0), entropy_N.masked_fill(~valid_N, 0.0), softmax


def logit_grad_coefficients(
    softmax: SoftmaxStats,
    grad_logp_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> LogitGradCoefficients:
    """Compute the coefficients of the gradient of the raw logits.

    Args:
        softmax: Statistics of the forward pass.
        grad_logp_N: `[N]` gradient of the log-probs; None if it is 0.
        grad_entropy_N: `[N]` gradient of the entropies; None if it is 0.
        temperature: Divisor of the logits.
        dtype: The compute dtype.
    """
    zero_N = torch.zeros_like(softmax.max_logit_N)
    target_coef_N = zero_N
    if grad_logp_N is not None:
        target_coef_N = (grad_logp_N.double() / temperature).masked_fill(~softmax.valid_N, 0.0)
    prob_coef_N, entropy_coef_N = target_coef_N, None
    inverse_sum_N = softmax.log_sum_exp_N.neg().exp()
    if grad_entropy_N is not None:
        entropy_coef_N = (grad_entropy_N.double() / temperature).masked_fill(~softmax.valid_N, 0.0)
        prob_coef_N = prob_coef_N + entropy_coef_N * (softmax.entropy_N - softmax.log_sum_exp_N)
        entropy_coef_N = (entropy_coef_N * inverse_sum_N).to(dtype)
    return LogitGradCoefficients(
        # If the logits are float32, this rounds to exactly the largest one.
        max_raw_logit_N=(softmax.max_logit_N * temperature).to(dtype),
        prob_coef_N=(prob_coef_N * inverse_sum_N).to(dtype),
        entropy_coef_N=entropy_coef_N,
        target_coef_N=target_coef_N.to(dtype),
    )

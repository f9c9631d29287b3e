"""Log-prob, entropy and their gradients of a softmax whose columns are seen part by part.

Of its part of the columns a pass keeps four float64 numbers a token, with l = logit / temperature
and t the target's l:

    MAX       m = max l
    SUM       S = sum exp(l - m)
    WEIGHTED  W = sum exp(l - m) (l - m)
    TARGET    t, or -inf where another part holds it

Parts merge, whether they are blocks of one rank's columns or ranks: with m over all parts and
s = m_part - m,  S = sum e^s S_part,  W = sum e^s (W_part + s S_part). Then

    logp = (t - m) - log S          H = log S - W / S

Both are sums of terms of one sign, or of the size of the result: nothing of the size of the
logits is ever subtracted, so logits of 1e4 cost no digits. With g and h the gradients of logp
and H, p = exp(l - m) / S and log p = (l - m) - log S:

    dl_j = g 1[j = target] - p_j (g + h (log p_j + H))

which a kernel evaluates as  target 1[j = target] - e (constant + slope x),  x = l_j - m,
e = exp(x), with one `target`, `constant` and `slope` a token (see `Slopes`).

This module sees no logits, weights or groups. Suffixes: N (or C) tokens, K parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX, SUM, WEIGHTED, TARGET = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """What the backward pass needs of each token, all [N] float64.

    center_N: largest l. log_sum_N: log S. entropy_N: H in nats. kept_N: bool, False where the
    token is ignored.
    """

    center_N: torch.Tensor
    log_sum_N: torch.Tensor
    entropy_N: torch.Tensor
    kept_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """Gradient of a token's raw logits: target 1[j = target] - e (constant + slope x).

    x = (raw - center) / temperature and e = exp(x). All [N] in the type of computation;
    center_N in raw units. slope_N is None where the entropy has no gradient.
    """

    center_N: torch.Tensor
    constant_N: torch.Tensor
    slope_N: torch.Tensor | None
    target_N: torch.Tensor

    def part(self, tokens: slice) -> Slopes:
        """The same for some of the tokens."""
        return Slopes(
            center_N=self.center_N[tokens],
            constant_N=self.constant_N[tokens],
            slope_N=None if self.slope_N is None else self.slope_N[tokens],
            target_N=self.target_N[tokens],
        )


def no_columns(num_tokens: int, device: torch.device) -> torch.Tensor:
    """[4, N] float64: the statistics of a part without columns."""
    stats_4N = torch.zeros(4, num_tokens, dtype=torch.float64, device=device)
    stats_4N[MAX] = stats_4N[TARGET] = -torch.inf
    return stats_4N


def merge(stats_K4N: torch.Tensor) -> torch.Tensor:
    """[4, N] float64 of all columns from [K, 4, N] float64 of the parts."""
    max_N = stats_K4N[:, MAX].amax(dim=0)
    # A part without columns has -inf here; at -1000 its weight is 0 all the same, without the
    # NaN of 0 * inf.
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


def outputs(
    stats_4N: torch.Tensor, kept_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Softmax]:
    """[N] log-prob and [N] entropy in float64, 0 where not kept, and what backward needs."""
    log_sum_N = stats_4N[SUM].log()
    entropy_N = log_sum_N - stats_4N[WEIGHTED] / stats_4N[SUM]
    logp_N = (stats_4N[TARGET] - stats_4N[MAX]) - log_sum_N
    softmax = Softmax(
        center_N=stats_4N[MAX], log_sum_N=log_sum_N, entropy_N=entropy_N, kept_N=kept_N
    )
    return logp_N.masked_fill(~kept_N, 0.0), entropy_N.masked_fill(~kept_N, 0.0), softmax


def slopes(
    softmax: Softmax,
    grad_logp_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Slopes:
    """The numbers of a token that turn its logits into their gradient; None is no gradient."""
    zero_N = torch.zeros_like(softmax.center_N)
    target_N = zero_N
    if grad_logp_N is not None:
        target_N = (grad_logp_N.double() / temperature).masked_fill(~softmax.kept_N, 0.0)
    constant_N, slope_N = target_N, None
    inverse_sum_N = softmax.log_sum_N.neg().exp()
    if grad_entropy_N is not None:
        slope_N = (grad_entropy_N.double() / temperature).masked_fill(~softmax.kept_N, 0.0)
        constant_N = constant_N + slope_N * (softmax.entropy_N - softmax.log_sum_N)
        slope_N = (slope_N * inverse_sum_N).to(dtype)
    return Slopes(
        # Rounds to the very logit it was, where that has 32 bits.
        center_N=(softmax.center_N * temperature).to(dtype),
        constant_N=(constant_N * inverse_sum_N).to(dtype),
        slope_N=slope_N,
        target_N=target_N.to(dtype),
    )

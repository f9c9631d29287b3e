"""Per-token estimators of KL(policy || reference), and KL penalties.

With d = logp - ref_logp and r = exp(-d): k1 = d (unbiased, may be negative), abs = |d|, k2 = d^2 /
2, k3 = r - 1 + d (unbiased, never negative); see J. Schulman, "Approximating KL divergence". k3 is
clamped to [-10, 10], so that a single token cannot dominate the batch.

The penalty is added to the loss or subtracted from the reward (`apply_kl_penalty`). Its coefficient
is constant or adapts to the measured KL (Ziegler et al., arXiv 1909.08593):

    coef *= 1 + clip(observed / target - 1, -0.2, 0.2) * num_samples / horizon

where a sample is one trajectory of the update.

B trajectories, T response positions. The caller averages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mega_agentrl.algo.masking import EXPONENT_BOUND, upcast, zero_masked
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.errors import InputError

K3_BOUND = 10.0
"""Largest absolute value of k3, in nats."""
ADAPTIVE_ERROR_BOUND = 0.2
"""Largest relative error of the KL that `update` acts on."""


def kl_penalty(logp_BT: torch.Tensor, ref_logp_BT: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the penalty in nats, [B, T] float32 (float64 for float64 inputs).

    The result is differentiable in `logp_BT`.

    Args:
        logp_BT: [B, T] log-probs under the policy.
        ref_logp_BT: [B, T] log-probs under the reference.
        kind: `k1`, `abs`, `k2` or `k3`.

    Raises:
        ValueError: `kind` is unknown.
    """
    check_same_shape(logp_BT=logp_BT, ref_logp_BT=ref_logp_BT)
    gap_BT = upcast(logp_BT) - upcast(ref_logp_BT)
    match kind:
        case "k1":
            return gap_BT
        case "abs":
            return gap_BT.abs()
        case "k2":
            return 0.5 * gap_BT * gap_BT
        case "k3":
            # The inner clamp changes no value that the outer one lets through; without it an
            # overflowing exponential has the gradient inf * 0.
            exponent_BT = (-gap_BT).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
            return (exponent_BT.expm1() - exponent_BT).clamp(-K3_BOUND, K3_BOUND)
    raise InputError("kind", kind, "one of k1, abs, k2, k3")


def apply_kl_penalty(
    reward_BT: torch.Tensor, kl_BT: torch.Tensor, mask_BT: torch.Tensor, *, coef: float
) -> torch.Tensor:
    """Return reward - coef * KL without gradient, 0 where masked, [B, T]."""
    check_same_shape(reward_BT=reward_BT, kl_BT=kl_BT, mask_BT=mask_BT)
    return zero_masked((reward_BT - coef * kl_BT).detach(), mask_BT)


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A KL coefficient that adapts towards a target KL."""

    coef: float
    """Current coefficient."""
    target: float
    """Target KL in nats per token."""
    horizon: float
    """Samples in which a KL that is off by 20 % or more changes the coefficient by 20 %."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise InputError("coef", self.coef, "at least 0")
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if value <= 0:
                raise InputError(name, value, "above 0")


def update(state: AdaptiveKL, observed_kl: float, num_samples: int) -> AdaptiveKL:
    """Return the state after an update of the policy.

    Args:
        state: state before the update.
        observed_kl: mean KL over its samples, nats per token.
        num_samples: number of trajectories that were trained on.
    """
    error = observed_kl / state.target - 1
    clipped_error = min(max(error, -ADAPTIVE_ERROR_BOUND), ADAPTIVE_ERROR_BOUND)
    return replace(state, coef=state.coef * (1 + clipped_error * num_samples / state.horizon))

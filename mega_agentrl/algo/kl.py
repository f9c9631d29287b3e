"""Per-token estimators of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - ref_logp and r = exp(-d): k1 = d (unbiased, may be negative), abs = |d|,
k2 = d^2 / 2, k3 = r - 1 + d (unbiased, never negative), J. Schulman, "Approximating KL
divergence". k3 is clamped to [-10, 10]: one token far off must not swamp the batch.

B trajectories, T response positions. Masking and averaging are the caller's.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.shapes import same_shape

K3_BOUND = 10.0
EXPONENT_BOUND = 20.0


def kl_penalty(logp_BT: torch.Tensor, ref_logp_BT: torch.Tensor, kind: str) -> torch.Tensor:
    """[B, T] float32 penalty in nats, differentiable in `logp_BT`.

    logp_BT, ref_logp_BT: [B, T] float log-probs under the policy and the reference.
    kind: `k1`, `abs`, `k2` or `k3`.
    """
    same_shape(logp_BT=logp_BT, ref_logp_BT=ref_logp_BT)
    gap_BT = logp_BT.float() - ref_logp_BT.float()
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
    raise ValueError(f"kind={kind}: expected one of k1, abs, k2, k3")

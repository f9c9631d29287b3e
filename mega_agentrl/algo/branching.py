"""ARPO's branching rules: fork a trajectory where the entropy rose.

The paper's rule (arXiv 2507.19849): P = alpha + beta * dH, fork if P > tau, where dH is the mean
token entropy after a tool's answer minus the trajectory's baseline. The released code's rule: draw
u ~ U[0, 1), fork if clamp(u - w * dH, 0, 1) is at most the branch probability, with dH from
`released_segment_entropy`, a sum over tokens divided by ln V.

T tokens, K most probable alternatives of each. Takes and returns plain floats or 0-d tensors. The
rollout decides when to branch and which entropies to compare.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.algo.shape_checks import check_rank

RELEASED_WINDOW_TOKENS = 20
TAIL_FLOOR = 1e-12


def token_entropy_topk(logprob_TK: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats from top-K log-probs, the tail counted as one outcome, [T].

    Args:
        logprob_TK: [T, K] float; -inf marks an absent alternative.
    """
    check_rank(logprob_TK=logprob_TK)
    prob_TK = logprob_TK.exp()
    tail_T = (1 - prob_TK.sum(dim=1)).clamp(min=0)
    return _entropy_terms(logprob_TK).sum(dim=1) - tail_T * tail_T.clamp(min=TAIL_FLOOR).log()


def released_segment_entropy(logprob_TK: torch.Tensor, vocab_size: int) -> float:
    """Return -sum p ln p over the alternatives of the first 20 tokens, divided by ln V.

    As in the released code, it is neither averaged over tokens nor renormalized.
    """
    check_rank(logprob_TK=logprob_TK)
    if vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size}: expected at least 2")
    total = _entropy_terms(logprob_TK[:RELEASED_WINDOW_TOKENS].double()).sum()
    return float(total) / math.log(vocab_size)


def branch_probability(delta_h: float, *, alpha: float, beta: float) -> float:
    """Return the paper's P = alpha + beta * dH, not clamped; dH in nats."""
    return alpha + beta * delta_h


def should_branch(p: float, *, tau: float) -> bool:
    """Return the paper's decision: P strictly above tau."""
    return bool(p > tau)


def released_should_branch(
    u: float, delta_h: float, *, branch_probability: float, entropy_weight: float
) -> bool:
    """Return the released code's decision, clamp(u - w * dH, 0, 1) <= branch probability."""
    score = min(max(u - entropy_weight * delta_h, 0.0), 1.0)
    return bool(score <= branch_probability)


def _entropy_terms(logprob_TK: torch.Tensor) -> torch.Tensor:
    """Return -p ln p, with its limit 0 at p = 0."""
    finite_TK = logprob_TK.clamp(min=torch.finfo(logprob_TK.dtype).min)
    return -logprob_TK.exp() * finite_TK

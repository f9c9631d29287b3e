"""ARPO's branching rules: fork a trajectory where the entropy rose.

The paper's rule (arXiv 2507.19849): P = alpha + beta * dH, fork if P > tau, where dH is the mean
token entropy after a tool's answer minus the trajectory's baseline. The released code's rule: draw
u ~ U[0, 1), fork if clamp(u - w * dH, 0, 1) is at most the branch probability, where dH is a
difference of `released_segment_entropy`, a sum over tokens divided by ln V.

T tokens, K most probable alternatives of each, V words of the vocabulary. The rules take plain
floats or 0-d tensors. The rollout decides when to branch and which entropies to compare
(`rollout.branching`).
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.algo.shape_checks import check_rank
from mega_agentrl.errors import InputError

RELEASED_WINDOW_TOKENS = 20
"""Tokens of a segment that `released_segment_entropy` reads."""
TAIL_FLOOR = 1e-12
"""Least probability of the tail inside the logarithm."""


def token_entropy_topk(logprob_TK: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each token in nats, where the tail counts as one outcome, [T].

    The tail is the probability that the K alternatives leave over.

    Args:
        logprob_TK: [T, K] log-probs of the alternatives; -inf marks an absent alternative.
    """
    check_rank(logprob_TK=logprob_TK)
    prob_TK = logprob_TK.exp()
    tail_T = (1 - prob_TK.sum(dim=1)).clamp(min=0)
    return _entropy_terms(logprob_TK).sum(dim=1) - tail_T * tail_T.clamp(min=TAIL_FLOOR).log()


def released_segment_entropy(logprob_TK: torch.Tensor, vocab_size: int) -> float:
    """Return -sum p ln p over the alternatives of the first 20 tokens, divided by ln V.

    As in the released code, the sum is not averaged over the tokens, and the probabilities are not
    renormalized.

    Args:
        logprob_TK: [T, K] log-probs of the alternatives of the segment's tokens, nats.
        vocab_size: V, at least 2.

    Raises:
        ValueError: `vocab_size` is below 2.
    """
    check_rank(logprob_TK=logprob_TK)
    if vocab_size < 2:
        raise InputError("vocab_size", vocab_size, "at least 2")
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
    """Return the released code's decision, clamp(u - w * dH, 0, 1) <= branch probability.

    Args:
        u: uniform random number from [0, 1).
        delta_h: dH, the segment's entropy less that of the baseline.
        branch_probability: probability of a fork at dH = 0.
        entropy_weight: w.
    """
    score = min(max(u - entropy_weight * delta_h, 0.0), 1.0)
    return bool(score <= branch_probability)


def _entropy_terms(logprob_TK: torch.Tensor) -> torch.Tensor:
    """Return -p ln p, [T, K], with the limit 0 at p = 0."""
    finite_TK = logprob_TK.clamp(min=torch.finfo(logprob_TK.dtype).min)
    return -logprob_TK.exp() * finite_TK

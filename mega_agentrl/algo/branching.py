"""ARPO's branching: how much the entropy rose, and whether that is enough to fork.

Two laws. The paper's (arXiv 2507.19849): P = alpha + beta * dH, fork when P > tau, with dH
the mean token entropy after a tool's answer minus the trajectory's baseline. The released
code's: a coin u ~ U[0, 1) lowered by w * dH, fork when it is not above the probability, with
dH from `released_segment_entropy`, a sum over tokens divided by ln V.

T tokens, K most probable alternatives of each. Plain floats or 0-d tensors in, the same out.
When and from what entropies a decision is made is the rollout's business.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.algo.shapes import check_rank

RELEASED_WINDOW_TOKENS = 20
TAIL_FLOOR = 1e-12


def token_entropy_topk(logprob_TK: torch.Tensor) -> torch.Tensor:
    """[T] entropy in nats from the top-K log-probs, the rest counted as one outcome.

    logprob_TK: [T, K] float; -inf marks an absent alternative.
    """
    check_rank(logprob_TK=logprob_TK)
    prob_TK = logprob_TK.exp()
    tail_T = (1 - prob_TK.sum(dim=1)).clamp(min=0)
    return _plogp(logprob_TK).sum(dim=1) - tail_T * tail_T.clamp(min=TAIL_FLOOR).log()


def released_segment_entropy(logprob_TK: torch.Tensor, vocab_size: int) -> float:
    """-sum p ln p over the first 20 tokens' listed alternatives, divided by ln V.

    Neither averaged over tokens nor renormalised, as in the released code.
    """
    check_rank(logprob_TK=logprob_TK)
    if vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size}: expected at least 2")
    total = _plogp(logprob_TK[:RELEASED_WINDOW_TOKENS].double()).sum()
    return float(total) / math.log(vocab_size)


def branch_probability(delta_h: float, *, alpha: float, beta: float) -> float:
    """The paper's P = alpha + beta * dH; dH in nats, P not clamped."""
    return alpha + beta * delta_h


def should_branch(p: float, *, tau: float) -> bool:
    """The paper's rule: strictly above the threshold."""
    return bool(p > tau)


def released_should_branch(
    u: float, delta_h: float, *, branch_probability: float, entropy_weight: float
) -> bool:
    """The released rule: clamp(u - w * dH, 0, 1) <= branch probability, for u ~ U[0, 1)."""
    score = min(max(u - entropy_weight * delta_h, 0.0), 1.0)
    return bool(score <= branch_probability)


def _plogp(logprob_TK: torch.Tensor) -> torch.Tensor:
    """-p ln p, with the limit 0 at p = 0."""
    finite_TK = logprob_TK.clamp(min=torch.finfo(logprob_TK.dtype).min)
    return -logprob_TK.exp() * finite_TK

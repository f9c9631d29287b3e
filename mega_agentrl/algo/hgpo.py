"""HGPO: turns compared at several depths of common history (arXiv 2602.22817).

GiGPO compares all turns that start from an equal state, whatever came before. At depth 1 HGPO
compares only the turns whose previous states are equal, too, at depth 2 those with two equal
previous states, and so on: fewer turns, but more similar ones. The advantage of a turn is the
weighted mean over the depths.

K depths, S turns of all trajectories.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.advantage import group_index_and_size, grpo
from mega_agentrl.errors import InputError


def hgpo(
    return_S: torch.Tensor,
    context_KS: torch.Tensor,
    *,
    weight_power: float = 1.0,
    norm_by_std: bool = False,
) -> torch.Tensor:
    """Return the advantage of each turn, [S].

        A = sum_k w_k A_k / sum_k w_k,    w_k = (k + 2)^weight_power

    A_k is the turn's return less the mean return of the turns with an equal context at depth k. The
    sums are over the depths at which another turn has an equal context; A is 0 if there is no such
    depth. The weight of depth k is based on k + 2, not on k + 1, because the released code gives
    the weight 1 to the comparison of whole trajectories, which is off by default and left out here.
    The released code also skips depths where A_k is exactly 0. Here they count, because 0 means
    that the turn is as good as the mean, not that nothing is known.

    Args:
        return_S: [S] discounted return of each turn.
        context_KS: [K, S] int64 id of each turn's context: at depth 0 the state before the turn, at
            depth k this state and the k states before it. Negative where a turn has fewer states
            before it. Turns of different prompts have different contexts.
        weight_power: Power of the weights; 0 weighs all depths alike.
        norm_by_std: Whether to divide A_k by the standard deviation.

    Raises:
        ValueError: The shapes do not fit.
    """
    if context_KS.ndim != 2 or context_KS.shape[1:] != return_S.shape:
        expected = f"(K, S) with return_S of shape (S,), which has {tuple(return_S.shape)}"
        raise InputError("context_KS", tuple(context_KS.shape), expected)
    total_S = torch.zeros_like(return_S, dtype=torch.float64)
    weight_sum_S = torch.zeros_like(total_S)
    for depth, context_S in enumerate(context_KS):
        _, size_S = group_index_and_size(context_S)
        has_others_S = (context_S >= 0) & (size_S > 1)
        advantage_S = grpo(return_S.double(), context_S, norm_by_std=norm_by_std)
        weight = float(depth + 2) ** weight_power
        total_S = total_S + weight * advantage_S.where(has_others_S, 0.0)
        weight_sum_S = weight_sum_S + weight * has_others_S
    return (total_S / weight_sum_S.where(weight_sum_S > 0, 1.0)).to(return_S.dtype)

"""AEPO, the agentic one (arXiv 2510.14545): entropy balanced between rollout and update.

Three formulas. How many of n trajectories start from the root, from the entropy at the
question and that over the tool steps: n * sigmoid((H_root - H_tool) / 2), rounded down, plus
one. By how much a path's chance to branch falls when it has branched l times in a row:
max(0, 1 - rate * l). And an advantage that grows with a token's entropy:
A * (1 + weight * z), z = (H - mean) / std over the unmasked tokens given.

B trajectories, T response positions; entropies in any one unit. The balanced clip is in
`policy_loss.clipped`; when a path is asked, and what l counts, is the rollout's business.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.algo.masking import masked_moments
from mega_agentrl.algo.scan import by_rows
from mega_agentrl.algo.shapes import same_shape

MONITOR_SLOPE = 0.5


def entropy_scaled(
    advantage_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    weight: float = 0.2,
) -> torch.Tensor:
    """[B, T] float32: A * (1 + weight * z), 0 where masked; no gradient reaches the entropies.

    z is over the unmasked positions of these tensors, std unbiased; it is 0 where they do not
    differ. Nothing keeps 1 + weight * z positive, in the paper as here.
    """
    same_shape(advantage_BT=advantage_BT, entropy_BT=entropy_BT, mask_BT=mask_BT)
    entropy_BT = entropy_BT.detach().float()
    mean, variance = masked_moments(entropy_BT, mask_BT)
    slope = (weight * torch.where(variance > 0, variance, 1.0).rsqrt()).float()
    middle = mean.float()

    def rows(
        advantage_RT: torch.Tensor, entropy_RT: torch.Tensor, on_RT: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(on_RT, advantage_RT * (1 + slope * (entropy_RT - middle)), 0.0)

    return by_rows(rows, advantage_BT.float(), entropy_BT, mask_BT.bool())


def initial_rollouts(n: int, h_root: float, h_tool: float) -> int:
    """How many of `n` trajectories start from the root, 1 to n; equal entropies give n // 2 + 1."""
    if n < 1:
        raise ValueError(f"n={n}: expected at least 1 trajectory")
    share = 1 / (1 + math.exp(-MONITOR_SLOPE * (h_root - h_tool)))
    return min(max(int(n * share) + 1, 1), n)


def branch_penalty(l: int, *, rate: float = 0.05) -> float:  # noqa: E741  the paper's letter
    """The factor max(0, 1 - rate * l) on the chance to branch after l branches in a row."""
    return max(0.0, 1.0 - rate * l)

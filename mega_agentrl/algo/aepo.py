"""Agentic entropy-balanced policy optimization, AEPO (arXiv 2510.14545).

The module has three formulas:

    initial_rollouts   min(n, floor(n * sigmoid((H_root - H_tool) / 2)) + 1)
                       how many of n trajectories start from the root, from the entropies of the
                       question and of the tool steps
    branch_penalty     max(0, 1 - rate * l)
                       the factor on a path's branch probability after l branches in a row
    entropy_scaled     A * (1 + weight * z),    z = (H - mean) / std over the unmasked tokens
                       an advantage that grows with the token's entropy

B trajectories, T response positions, R rows of a chunk; all entropies in the same unit. AEPO's
balanced clip is in `policy_loss.clipped`. The rollout decides when a path may branch and counts l.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.algo.masking import map_row_chunks, masked_moments
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.errors import InputError

MONITOR_SLOPE = 0.5
"""Factor of the difference of the entropies in `initial_rollouts`."""


def entropy_scaled(
    advantage_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    weight: float = 0.2,
) -> torch.Tensor:
    """Return A * (1 + weight * z), 0 where masked, [B, T] float32; no gradient to the entropies.

    z is computed over the unmasked positions of these tensors with the unbiased std; it is 0 if all
    entropies are equal. As in the paper, 1 + weight * z may become negative.

    Args:
        advantage_BT: [B, T] advantages.
        entropy_BT: [B, T] token entropies.
        mask_BT: [B, T] mask.
        weight: weight of z.
    """
    check_same_shape(advantage_BT=advantage_BT, entropy_BT=entropy_BT, mask_BT=mask_BT)
    entropy_BT = entropy_BT.detach().float()
    mean, variance = masked_moments(entropy_BT, mask_BT)
    slope = (weight * torch.where(variance > 0, variance, 1.0).rsqrt()).float()
    centre = mean.float()

    def scale_rows(
        advantage_RT: torch.Tensor, entropy_RT: torch.Tensor, mask_RT: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(mask_RT, advantage_RT * (1 + slope * (entropy_RT - centre)), 0.0)

    return map_row_chunks(scale_rows, advantage_BT.float(), entropy_BT, mask_BT.bool())


def initial_rollouts(n: int, h_root: float, h_tool: float) -> int:
    """Return how many of `n` trajectories start from the root, in [1, n].

    Equal entropies give n // 2 + 1.

    Args:
        n: number of trajectories of the prompt.
        h_root: mean entropy of the first tokens after the question.
        h_tool: mean entropy of the first tokens after each tool answer.

    Raises:
        ValueError: `n` is below 1.
    """
    if n < 1:
        raise InputError("n", n, "at least 1 trajectory")
    share = 1 / (1 + math.exp(-MONITOR_SLOPE * (h_root - h_tool)))
    return min(max(int(n * share) + 1, 1), n)


def branch_penalty(l: int, *, rate: float = 0.05) -> float:  # noqa: E741  the paper's letter
    """Return max(0, 1 - rate * l), the factor on the branch probability after l branches."""
    return max(0.0, 1.0 - rate * l)

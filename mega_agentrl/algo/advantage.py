"""Advantages: what each trajectory, or each token, earned beyond its baseline.

B trajectories, T response positions. `group_B` is an integer tensor: equal value = same
prompt; the values themselves do not matter. Sums run in float64 and come back in the
dtype of the input: a group of equal rewards gives exactly 0 and the order of the members
does not show. No gradients, no whitening unless the function says so.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masking import masked_whiten
from mega_agentrl.algo.scan import by_rows, discounted_sum, following, over_sampled, row_parts
from mega_agentrl.algo.shapes import same_rows, same_shape


def grpo(
    reward_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """[B] (r - mean) / (std + eps) within the group (GRPO, arXiv 2402.03300).

    The std is the unbiased one. A group of one keeps mean 0 and std 1. Without
    `norm_by_std` the division is left out (Dr. GRPO, arXiv 2503.20783).
    """
    same_shape(reward_B=reward_B, group_B=group_B)
    index_B, size_B = _groups(group_B)
    reward64_B = reward_B.double()
    single_B = size_B == 1
    mean_B = torch.where(single_B, 0.0, _group_sum(reward64_B, index_B) / size_B)
    centred_B = reward64_B - mean_B
    if norm_by_std:
        square_B = _group_sum(centred_B * centred_B, index_B) / (size_B - 1).clamp(min=1)
        std_B = torch.where(single_B, 1.0, square_B.sqrt())
        centred_B = centred_B / (std_B + eps)
    return centred_B.to(reward_B.dtype)


def rloo(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """[B] reward minus the mean of the others in the group (arXiv 2402.14740).

    A group of one has no others and keeps its reward.
    """
    same_shape(reward_B=reward_B, group_B=group_B)
    index_B, size_B = _groups(group_B)
    reward64_B = reward_B.double()
    others_B = (_group_sum(reward64_B, index_B) - reward64_B) / (size_B - 1).clamp(min=1)
    baseline_B = torch.where(size_B == 1, 0.0, others_B)
    return (reward64_B - baseline_B).to(reward_B.dtype)


def remax(reward_B: torch.Tensor, baseline_B: torch.Tensor) -> torch.Tensor:
    """[B] reward minus that of the greedy answer to the same prompt (arXiv 2310.10505)."""
    same_shape(reward_B=reward_B, baseline_B=baseline_B)
    return reward_B - baseline_B


def reinforce_plus_plus(
    reward_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """[B, T] discounted return, whitened over the batch's unmasked tokens (arXiv 2501.03262).

    Tool tokens are skipped: they neither discount nor stop the return, so what is earned
    after a tool's answer reaches the tokens before it.
    """
    return_BT = over_sampled(lambda reward_RL: discounted_sum(reward_RL, gamma), mask_BT, reward_BT)
    return masked_whiten(return_BT.to(reward_BT.dtype), mask_BT)


def reinforce_plus_plus_baseline(
    reward_B: torch.Tensor, group_B: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """[B, T] reward minus the group's mean, whitened over the batch's unmasked tokens."""
    centred_B = grpo(reward_B, group_B, norm_by_std=False)
    return masked_whiten(broadcast(centred_B, mask_BT), mask_BT)


def gae(
    reward_BT: torch.Tensor,
    value_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] advantage and [B, T] return, 0 where masked (GAE, arXiv 1506.02438).

    Tool tokens are no states: the token before a tool's answer has the first token after it
    as its successor.
    """
    same_shape(reward_BT=reward_BT, value_BT=value_BT, mask_BT=mask_BT)

    def formula(reward_RL: torch.Tensor, value_RL: torch.Tensor) -> torch.Tensor:
        delta_RL = reward_RL + gamma * following(value_RL) - value_RL
        return discounted_sum(delta_RL, gamma * lam)

    advantage_BT = over_sampled(formula, mask_BT, reward_BT, value_BT).to(reward_BT.dtype)
    state_BT = torch.where(mask_BT.bool(), value_BT, torch.zeros_like(value_BT))
    return advantage_BT, (advantage_BT + state_BT).to(reward_BT.dtype)


def broadcast(advantage_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """[B, T] the trajectory's advantage on its unmasked tokens, 0 elsewhere."""
    same_rows(advantage_B, mask_BT)
    grid_BT = advantage_B.unsqueeze(1).expand(mask_BT.shape)
    return torch.where(mask_BT.bool(), grid_BT, torch.zeros_like(grid_BT))


def arpo_hard(
    advantage_B: torch.Tensor, node_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """[B, T] mean advantage of the trajectories that hold the token (ARPO, arXiv 2507.19849).

    node_BT: [B, T] integer id of the tree token; equal id = physically the same token, so
    tokens that are equal by chance are not shared. Masked positions neither give nor get.
    """
    same_shape(node_BT=node_BT, mask_BT=mask_BT)
    same_rows(advantage_B, mask_BT)
    on_BT = mask_BT.bool()
    place_BT, num_nodes = _places(node_BT, on_BT)
    total_N = advantage_B.new_zeros(num_nodes + 1, dtype=torch.float64)
    count_N = torch.zeros_like(total_N)
    for place_RT, advantage_R in row_parts(place_BT, advantage_B.double()):
        grid_RT = advantage_R.unsqueeze(1).expand(place_RT.shape)
        total_N.index_add_(0, place_RT.flatten(), grid_RT.flatten())
        count_N.index_add_(0, place_RT.flatten(), torch.ones_like(grid_RT).flatten())
    mean_N = (total_N / count_N.clamp(min=1)).to(advantage_B.dtype)
    mean_N[num_nodes] = 0  # that of the masked positions
    return mean_N[place_BT]


def _groups(group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Group index of each row from 0, and the size of its group."""
    _, index_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    return index_B, count_G[index_B]


def _group_sum(value_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """The sum over its group, for each row."""
    total_B = torch.zeros_like(value_B).index_add(0, index_B, value_B)  # at most B groups
    return total_B[index_B]


def _places(node_BT: torch.Tensor, on_BT: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[B, T] a number from 0 for each unmasked node, one behind all of them where masked.

    Ids that lie as close as those of `batch.pack` are used as they are, less the smallest;
    sorting out others costs most of the time of `arpo_hard`.
    """
    if not bool(on_BT.any()):
        return torch.zeros_like(node_BT, dtype=torch.int64), 0
    limit = torch.iinfo(node_BT.dtype)
    low, high = limit.max, limit.min
    for node_RT, on_RT in row_parts(node_BT, on_BT):
        low = min(low, int(torch.where(on_RT, node_RT, limit.max).amin()))
        high = max(high, int(torch.where(on_RT, node_RT, limit.min).amax()))
    size = high - low + 1
    if size <= 2 * node_BT.numel():
        return by_rows(lambda *part: _from(low, size, *part), node_BT, on_BT), size
    unique_N, index_N = torch.unique(node_BT[on_BT], return_inverse=True)
    size = len(unique_N)
    behind_BT = torch.full_like(node_BT, size, dtype=torch.int64)
    return behind_BT.masked_scatter(on_BT, index_N), size


def _from(low: int, behind: int, node_RT: torch.Tensor, on_RT: torch.Tensor) -> torch.Tensor:
    """Ids counted from the lowest one."""
    return torch.where(on_RT, node_RT.long() - low, behind)

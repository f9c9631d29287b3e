"""Advantage estimators, per trajectory or per token.

B trajectories, T response positions, G groups. `group_B` is an integer tensor; equal values mean
the same prompt. Sums run in float64 and results are returned in the dtype of the input, so that a
group of equal rewards gives exactly 0 and the order of its members has no effect. Results carry no
gradient and are not whitened unless the function says so.

Discounted sums y_t = x_t + g y_{t+1} skip masked tokens (`apply_to_sampled_tokens`), so that the
tokens of a tool's answer neither discount nor stop the sum. They are computed in blocks of 64
tokens: a product with a triangular matrix of powers of g within each block, and one step per block
for the sum that is carried over from the blocks to its right. Suffixes of a chunk: R rows, L
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.masking import (
    map_row_chunks,
    masked_whiten,
    row_chunks,
    shift,
    zero_masked,
)
from mega_agentrl.algo.shape_checks import check_same_rows, check_same_shape

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_TOKENS = 64
"""Tokens of a block of `discounted_sum`."""


def grpo(
    reward_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return (r - mean) / (std + eps) within each group, [B] (GRPO, arXiv 2402.03300).

    The std is unbiased. For a group of one, mean is 0 and std is 1.

    Args:
        reward_B: [B] reward of each trajectory.
        group_B: [B] group of each trajectory.
        norm_by_std: whether to divide by the std; False is Dr. GRPO (arXiv 2503.20783).
        eps: added to the std.
    """
    check_same_shape(reward_B=reward_B, group_B=group_B)
    index_B, size_B = group_index_and_size(group_B)
    reward64_B = reward_B.double()
    is_single_B = size_B == 1
    mean_B = torch.where(is_single_B, 0.0, group_sum(reward64_B, index_B) / size_B)
    centred_B = reward64_B - mean_B
    if norm_by_std:
        variance_B = group_sum(centred_B * centred_B, index_B) / (size_B - 1).clamp(min=1)
        std_B = torch.where(is_single_B, 1.0, variance_B.sqrt())
        centred_B = centred_B / (std_B + eps)
    return centred_B.to(reward_B.dtype)


def group_z_score(
    reward_B: torch.Tensor, group_B: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    """Return (r - mean) / (std + eps) within each group, [B] float64, with the biased std.

    The score of a group of one is 0.
    """
    check_same_shape(reward_B=reward_B, group_B=group_B)
    index_B, size_B = group_index_and_size(group_B)
    reward64_B = reward_B.double()
    centred_B = reward64_B - group_sum(reward64_B, index_B) / size_B
    variance_B = group_sum(centred_B.square(), index_B) / size_B
    return centred_B / (variance_B.sqrt() + eps)


def rloo(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Return the reward minus the mean of the other group members, [B] (RLOO, arXiv 2402.14740).

    A group of one keeps its reward.
    """
    check_same_shape(reward_B=reward_B, group_B=group_B)
    index_B, size_B = group_index_and_size(group_B)
    reward64_B = reward_B.double()
    others_B = (group_sum(reward64_B, index_B) - reward64_B) / (size_B - 1).clamp(min=1)
    baseline_B = torch.where(size_B == 1, 0.0, others_B)
    return (reward64_B - baseline_B).to(reward_B.dtype)


def remax(reward_B: torch.Tensor, baseline_B: torch.Tensor) -> torch.Tensor:
    """Return the reward minus that of the prompt's greedy answer, [B] (ReMax, arXiv 2310.10505)."""
    check_same_shape(reward_B=reward_B, baseline_B=baseline_B)
    return reward_B - baseline_B


def reinforce_plus_plus(
    reward_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float = 1.0
) -> torch.Tensor:
    """Return the discounted return, whitened over all unmasked tokens (REINFORCE++).

    The return is R_t = r_t + gamma R_{t+1} (arXiv 2501.03262). Tool tokens are skipped: they
    neither discount nor stop the return, so a reward after a tool's answer reaches the tokens
    before it.

    Args:
        reward_BT: [B, T] reward of each token.
        mask_BT: [B, T] mask.
        gamma: discount per unmasked token.

    Returns:
        [B, T], 0 where masked.
    """
    return_BT = apply_to_sampled_tokens(
        lambda reward_RL: discounted_sum(reward_RL, gamma), mask_BT, reward_BT
    )
    return masked_whiten(return_BT.to(reward_BT.dtype), mask_BT)


def reinforce_plus_plus_baseline(
    reward_B: torch.Tensor, group_B: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the reward minus the group mean, whitened over all unmasked tokens, [B, T].

    This is the variant of REINFORCE++ with a group baseline (arXiv 2501.03262).
    """
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
    """Return advantages and returns, each [B, T] and 0 where masked (GAE, arXiv 1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V_t

    Tool tokens are not states: the successor of the token before a tool's answer is the first token
    after it.

    Args:
        reward_BT: [B, T] reward of each token.
        value_BT: [B, T] value of the state before each token, from the critic.
        mask_BT: [B, T] mask.
        gamma: discount per unmasked token.
        lam: weight of longer returns, from 0 to 1.
    """
    check_same_shape(reward_BT=reward_BT, value_BT=value_BT, mask_BT=mask_BT)

    def compute_gae(reward_RL: torch.Tensor, value_RL: torch.Tensor) -> torch.Tensor:
        delta_RL = reward_RL + gamma * shift(value_RL, -1) - value_RL
        return discounted_sum(delta_RL, gamma * lam)

    advantage_BT = apply_to_sampled_tokens(compute_gae, mask_BT, reward_BT, value_BT).to(
        reward_BT.dtype
    )
    return advantage_BT, (advantage_BT + zero_masked(value_BT, mask_BT)).to(reward_BT.dtype)


def broadcast(advantage_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return each trajectory's advantage on its unmasked tokens, 0 where masked, [B, T]."""
    check_same_rows(advantage_B, mask_BT)
    return zero_masked(advantage_B.unsqueeze(1).expand(mask_BT.shape), mask_BT)


def arpo_hard(
    advantage_B: torch.Tensor, node_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return the mean advantage of the trajectories that share a token, [B, T].

    This is ARPO's hard advantage estimate (arXiv 2507.19849).

    Args:
        advantage_B: [B] advantage of each trajectory.
        node_BT: [B, T] integer id of the tree token (`TrainBatch.tree_token_BT`; the parameter's
            name is part of the function's fixed interface). Equal ids mean the same sampled token;
            tokens of equal value with different ids are not shared.
        mask_BT: [B, T] mask; masked positions do not contribute and get 0.
    """
    check_same_shape(node_BT=node_BT, mask_BT=mask_BT)
    check_same_rows(advantage_B, mask_BT)
    index_BT, num_tokens = _dense_token_index(node_BT, mask_BT.bool())
    total_N = advantage_B.new_zeros(num_tokens + 1, dtype=torch.float64)
    count_N = torch.zeros_like(total_N)
    for index_RT, advantage_R in row_chunks(index_BT, advantage_B.double()):
        advantage_RT = advantage_R.unsqueeze(1).expand(index_RT.shape)
        total_N.index_add_(0, index_RT.flatten(), advantage_RT.flatten())
        count_N.index_add_(0, index_RT.flatten(), torch.ones_like(advantage_RT).flatten())
    mean_N = (total_N / count_N.clamp(min=1)).to(advantage_B.dtype)
    mean_N[num_tokens] = 0  # the index of the masked positions
    return mean_N[index_BT]


def group_index_and_size(group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index from 0 of each row's group and the size of this group, both [B] int64."""
    _, index_B, count_G = torch.unique(group_B, return_inverse=True, return_counts=True)
    return index_B, count_G[index_B]


def group_sum(value_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """Return the sum of `value_B` over each row's group, [B].

    Args:
        value_B: [B] values.
        index_B: [B] int64 group index of each row, below B (`group_index_and_size`).
    """
    total_B = torch.zeros_like(value_B).index_add(0, index_B, value_B)  # at most B groups
    return total_B[index_B]


def apply_to_sampled_tokens(
    formula: Callable[..., torch.Tensor], mask_BT: torch.Tensor, *grids_BT: torch.Tensor
) -> torch.Tensor:
    """Apply `formula` to the unmasked values of each row; 0 where masked, [B, T] float64.

    Args:
        formula: maps one [R, L] float64 tensor for each grid to an [R, L] tensor. Each row of its
            arguments holds the unmasked values in order, followed by zeros.
        mask_BT: [B, T] mask.
        grids_BT: [B, T] tensors.
    """
    for grid_BT in grids_BT:
        check_same_shape(grid_BT=grid_BT, mask_BT=mask_BT)

    def apply_to_rows(mask_RT: torch.Tensor, *grids_RT: torch.Tensor) -> torch.Tensor:
        mask_RT = mask_RT.bool()
        index_RT = mask_RT.cumsum(1) - 1
        target_RT = torch.where(mask_RT, index_RT, mask_RT.shape[1])
        result_RL = formula(*(_compact_rows(grid_RT, mask_RT, target_RT) for grid_RT in grids_RT))
        result_RT = result_RL.gather(1, index_RT.clamp(min=0))
        return zero_masked(result_RT, mask_RT)

    return map_row_chunks(apply_to_rows, mask_BT, *grids_BT)


def discounted_sum(x_RL: torch.Tensor, factor: float) -> torch.Tensor:
    """Return y with y_t = x_t + factor * y_{t+1} in each row, [R, L]."""
    num_rows, width = x_RL.shape
    num_blocks = max(-(-width // BLOCK_TOKENS), 1)
    padded_RL = torch.nn.functional.pad(x_RL, (0, num_blocks * BLOCK_TOKENS - width))
    offset = torch.arange(BLOCK_TOKENS, device=x_RL.device, dtype=x_RL.dtype)
    base = torch.as_tensor(factor, device=x_RL.device, dtype=x_RL.dtype)
    # decay[j, i] is the weight of x_j in y_i for positions j >= i of the same block.
    decay = torch.where(
        offset[:, None] >= offset, base ** (offset[:, None] - offset).clamp(min=0), 0.0
    )
    block_sum = padded_RL.view(num_rows, num_blocks, BLOCK_TOKENS) @ decay
    carry_R = x_RL.new_zeros(num_rows)
    carries: list[torch.Tensor] = []  # y at the start of the next block, by block from the right
    for block in range(num_blocks - 1, -1, -1):
        carries.append(carry_R)
        carry_R = block_sum[:, block, 0] + base**BLOCK_TOKENS * carry_R
    carry_decay = base ** (BLOCK_TOKENS - offset)
    total = block_sum + torch.stack(carries[::-1], dim=1)[:, :, None] * carry_decay
    return total.view(num_rows, num_blocks * BLOCK_TOKENS)[:, :width]


def _compact_rows(
    x_RT: torch.Tensor, mask_RT: torch.Tensor, target_RT: torch.Tensor
) -> torch.Tensor:
    """Move the unmasked values to the front of each row, zeros after them, [R, T + 1] float64.

    Args:
        x_RT: [R, T] values.
        mask_RT: [R, T] bool mask.
        target_RT: [R, T] int64 position in the result of each value; T for masked ones.
    """
    values_RT = zero_masked(x_RT, mask_RT).double()
    empty_RL = values_RT.new_zeros(x_RT.shape[0], x_RT.shape[1] + 1)
    return empty_RL.scatter(1, target_RT, values_RT)


def _dense_token_index(
    tree_token_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return an index from 0 for each unmasked tree token, and the number of indices.

    Masked positions get the next index after these. Ids that fill at least about half of their
    range, as those of `batch.packing` do, are only shifted. Other ids are sorted, which takes most
    of the time of `arpo_hard`.
    """
    if not bool(mask_BT.any()):
        return torch.zeros_like(tree_token_BT, dtype=torch.int64), 0
    limit = torch.iinfo(tree_token_BT.dtype)
    low, high = limit.max, limit.min
    for token_RT, mask_RT in row_chunks(tree_token_BT, mask_BT):
        low = min(low, int(torch.where(mask_RT, token_RT, limit.max).amin()))
        high = max(high, int(torch.where(mask_RT, token_RT, limit.min).amax()))
    size = high - low + 1
    if size <= 2 * tree_token_BT.numel():
        index_BT = map_row_chunks(
            lambda *chunk: _shift_ids(low, size, *chunk), tree_token_BT, mask_BT
        )
        return index_BT, size
    unique_N, index_N = torch.unique(tree_token_BT[mask_BT], return_inverse=True)
    size = len(unique_N)
    index_BT = torch.full_like(tree_token_BT, size, dtype=torch.int64)
    return index_BT.masked_scatter(mask_BT, index_N), size


def _shift_ids(
    low: int, masked_index: int, token_RT: torch.Tensor, mask_RT: torch.Tensor
) -> torch.Tensor:
    return torch.where(mask_RT, token_RT.long() - low, masked_index)

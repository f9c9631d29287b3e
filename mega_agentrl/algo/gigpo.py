"""GiGPO: advantages of turns that start from the same state (arXiv 2505.10978).

Trajectories of a prompt with different histories may reach equal states, for example when a tool
gives both the same answer. GiGPO compares the turns that start from equal states like the answers
to one prompt. A state is identified by the prompt and the latest tool answer
(`train.estimators.turns`), not by the history before it, so the estimate is biased where the
history matters. `tree_credit` is exact, but compares only forks.

B trajectories, S turns of all trajectories.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.advantage import group_index_and_size, grpo
from mega_agentrl.algo.shape_checks import check_same_shape


def gigpo(
    reward_B: torch.Tensor,
    group_B: torch.Tensor,
    trajectory_S: torch.Tensor,
    state_S: torch.Tensor,
    num_later_S: torch.Tensor,
    *,
    gamma: float = 0.95,
    weight: float = 1.0,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Return the advantage of each turn, [S]: A + weight * A_turn.

    A is the trajectory's advantage in its group (`advantage.grpo`). A_turn is the advantage of the
    turn's discounted return, gamma^k r for a turn that k others follow, in the group of all turns
    that start from an equal state; it is 0 if there is no other such turn.

    Args:
        reward_B: [B] reward of each trajectory.
        group_B: [B] prompt of each trajectory.
        trajectory_S: [S] int64 index of each turn's trajectory.
        state_S: [S] int64 id of the state before the turn; turns of different prompts have
            different states.
        num_later_S: [S] number of later turns of the same trajectory.
        gamma: discount per turn.
        weight: weight of the turn's own advantage.
        norm_by_std: whether to divide both advantages by the standard deviations of their groups.
    """
    check_same_shape(reward_B=reward_B, group_B=group_B)
    check_same_shape(trajectory_S=trajectory_S, state_S=state_S, num_later_S=num_later_S)
    advantage_B = grpo(reward_B, group_B, norm_by_std=norm_by_std)
    return_S = reward_B[trajectory_S] * gamma**num_later_S
    advantage_S = grpo(return_S.to(reward_B.dtype), state_S, norm_by_std=norm_by_std)
    _, num_turns_S = group_index_and_size(state_S)
    return advantage_B[trajectory_S] + weight * advantage_S.where(num_turns_S > 1, 0.0)

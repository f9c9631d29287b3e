"""APPO: credit for the branching points of a rollout tree (arXiv 2606.12384), as released.

The paper scales a token's advantage by a "future value": how much more probable the tokens after it
are under the current policy than under the policy that sampled them. The released code has this
factor in its loss (`policy_loss.future_kl`). It also chooses branching points by a value, which
compares the trainer's log-probs with the engine's before the update. Both have the same weights
then, so this value is only their numerical mismatch (`mismatch_value`). `dual_group` is the
released estimate of advantages from two groups of rewards, of initial trajectories and of forks.

The estimator `appo` (`train.estimators.tree`) is this project's own variant: it replaces the
mismatch by the gain in value along the tree (`tree_credit.fork_advantages`).

L leaves, that is trajectories; N nodes; B rows; T response positions.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.advantage import apply_to_sampled_tokens, discounted_sum, group_z_score
from mega_agentrl.algo.masking import bounded_exp, masked_log_ratio
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.algo.tree_credit import ancestors_from_roots, check_nodes


def mismatch_value(
    train_logp_BT: torch.Tensor,
    rollout_logp_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    gamma: float,
    bound: float,
) -> torch.Tensor:
    """Return exp(sum_{j >= t} gamma^(j - t) (train_logp_j - rollout_logp_j)), [B, T].

    The result is clamped to [1, 1 + bound], as in the released code, and 1 where masked. Masked
    tokens do not discount; in the released code they do.

    Args:
        train_logp_BT: [B, T] log-probs of the sampled tokens from the trainer, nats.
        rollout_logp_BT: [B, T] log-probs of the same tokens from the engine, nats.
        mask_BT: [B, T] mask.
        gamma: discount per unmasked token.
        bound: largest excess of the value over 1.
    """
    check_same_shape(train_logp_BT=train_logp_BT, rollout_logp_BT=rollout_logp_BT, mask_BT=mask_BT)
    log_ratio_BT = masked_log_ratio(train_logp_BT, rollout_logp_BT, mask_BT)
    sum_BT = apply_to_sampled_tokens(
        lambda ratio_RL: discounted_sum(ratio_RL, gamma), mask_BT, log_ratio_BT
    )
    return bounded_exp(sum_BT).clamp(1, 1 + bound).to(log_ratio_BT.dtype)


def dual_group(
    reward_L: torch.Tensor,
    group_L: torch.Tensor,
    is_fork_L: torch.Tensor,
    leaf_node_L: torch.Tensor,
    parent_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantage of each leaf, [L], and an amount to add to each node's tokens, [N].

    The rewards of a prompt's initial trajectories and those of its forks are normalised separately,
    to mean 0 and biased std 1 (`advantage.group_z_score`). A fork is not trained on: its advantage
    is 0. The amount of a node is the mean normalised reward of the forks below it.

    Args:
        reward_L: [L] reward of each leaf.
        group_L: [L] prompt of each leaf.
        is_fork_L: [L] bool, whether the leaf is a fork of another one.
        leaf_node_L: [L] int64 node that each leaf ends in.
        parent_N: [N] int64 parent of each node, -1 for roots.

    Raises:
        ValueError: A shape is wrong, a node does not exist, or a parent is its own descendant.
    """
    check_same_shape(
        reward_L=reward_L, group_L=group_L, is_fork_L=is_fork_L, leaf_node_L=leaf_node_L
    )
    check_nodes(leaf_node_L, parent_N)
    _, prompt_L = torch.unique(group_L, return_inverse=True)
    score_L = group_z_score(reward_L, 2 * prompt_L + is_fork_L)
    total_N = torch.zeros_like(parent_N, dtype=torch.float64)
    count_N = torch.zeros_like(total_N)
    for has_node_L, node_M in ancestors_from_roots(leaf_node_L, parent_N):
        is_fork_M = is_fork_L[has_node_L].double()
        total_N = total_N.index_add(0, node_M, score_L[has_node_L] * is_fork_M)
        count_N = count_N.index_add(0, node_M, is_fork_M)
    amount_N = total_N / count_N.clamp(min=1)
    return score_L.where(~is_fork_L, 0.0).to(reward_L.dtype), amount_N.to(reward_L.dtype)

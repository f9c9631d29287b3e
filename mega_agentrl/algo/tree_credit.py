"""Advantages of the nodes of rollout trees, from the rewards of their leaves.

A rollout forks: several trajectories continue one history, which is the same for all of them token
for token and in the sandbox. A *node* is a run of tokens that the same trajectories share, from one
fork to the next. The mean reward of the leaves below a node is an unbiased estimate of the value of
the state at its end, and its difference to that of the parent estimates the advantage of what the
node added. Methods that group similar states of independent trajectories (GiGPO, arXiv 2505.10978)
approximate what is exact here.

L leaves, that is trajectories; N nodes; B rows; T response positions. Sums run in float64. Results
carry no gradient and are not whitened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from mega_agentrl.algo.advantage import group_index_and_size, group_sum, grpo
from mega_agentrl.algo.shape_checks import check_rank, check_same_shape

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The nodes of the trees that the rows of a batch are paths of."""

    node_BT: torch.Tensor
    """[B, T] int64 node of each unmasked token, -1 where masked."""
    parent_N: torch.Tensor
    """[N] int64 parent of each node, -1 for roots."""
    leaf_node_B: torch.Tensor
    """[B] int64 node of each row's last unmasked token, -1 if it has none."""
    root_B: torch.Tensor
    """[B] int64 node of each row's first unmasked token, -1 if it has none."""


def token_tree(tree_token_BT: torch.Tensor, mask_BT: torch.Tensor) -> TokenTree:
    """Return the nodes of the trees that rows with common tokens make up.

    A node ends where a row leaves the others, so a node that no row leaves and none joins is never
    divided. Rows of different prompts must have different tokens.

    Args:
        tree_token_BT: [B, T] integer id of the tree token; equal ids mean the same sampled token.
        mask_BT: [B, T] mask; masked positions belong to no node.
    """
    check_same_shape(tree_token_BT=tree_token_BT, mask_BT=mask_BT)
    on_BT = mask_BT.bool()
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    last_BT = torch.where(on_BT, position_T, -1).cummax(1).values
    before_BT = pad(last_BT[:, :-1], (1, 0), value=-1)

    _, token_M, count_N = torch.unique(
        tree_token_BT[on_BT], return_inverse=True, return_counts=True
    )
    token_BT = torch.full_like(tree_token_BT, -1, dtype=torch.int64).masked_scatter(on_BT, token_M)
    num_rows_BT = torch.zeros_like(token_BT).masked_scatter(on_BT, count_N[token_M])
    # The rows that share a token are among those that share the token before it.
    is_start_BT = on_BT & (
        (before_BT < 0) | (num_rows_BT != num_rows_BT.gather(1, before_BT.clamp(min=0)))
    )
    start_BT = torch.where(is_start_BT, position_T, 0).cummax(1).values
    first_token_M = token_BT.gather(1, start_BT)[on_BT]
    unique_N, node_M = torch.unique(first_token_M, return_inverse=True)
    node_BT = torch.full_like(token_BT, -1).masked_scatter(on_BT, node_M)

    parent_N = unique_N.new_full((len(unique_N),), -1)
    parent_BT = torch.where(before_BT < 0, -1, node_BT.gather(1, before_BT.clamp(min=0)))
    parent_N[node_BT[is_start_BT]] = parent_BT[is_start_BT]
    # Where a row has no token, both are the -1 at its first position.
    leaf_node_B = node_BT.gather(1, last_BT[:, -1:].clamp(min=0)).squeeze(1)
    root_B = node_BT.gather(1, on_BT.int().argmax(1, keepdim=True)).squeeze(1)
    return TokenTree(node_BT, parent_N, leaf_node_B, root_B)


def fork_advantages(
    reward_L: torch.Tensor,
    leaf_node_L: torch.Tensor,
    parent_N: torch.Tensor,
    *,
    shrinkage: float | None,
    group_L: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the value of each node less the value of its parent, [N].

    Values are estimated from the roots down. That of a node with n leaves below it, whose mean
    reward is m, under a parent of value v, is

        v + n / (n + shrinkage) * (m - v)

    and v of a root is the mean reward of all leaves. So a node that few leaves speak for stays
    close to its parent. Without `shrinkage`, the positive part of the James-Stein estimate takes
    the place of n / (n + shrinkage), for the k children of one parent (roots are the children of
    the prompt) whose leaves' rewards have the pooled variance s^2 around their m:

        max(0, 1 - (k - 2) / sum_children(n * (m - v)^2 / s^2))

    and 1 where k < 3, or where no child has two leaves and s^2 is unknown. A node without a leaf
    below has its parent's value.

    Args:
        reward_L: [L] reward of each leaf.
        leaf_node_L: [L] int64 node that each leaf ends in; it may have children, too.
        parent_N: [N] int64 parent of each node, -1 for roots.
        shrinkage: Number of leaves at which a node's value is half its own, at least 0; None for
            James-Stein's estimate (Efron and Morris, 1973).
        group_L: [L] prompt of each leaf; all leaves below a root have the same one. None if the
            trees of one prompt are given.

    Raises:
        ValueError: A shape is wrong, a node does not exist, a parent is its own descendant, or
            `shrinkage` is negative.
    """
    if group_L is None:
        group_L = torch.zeros_like(leaf_node_L)
    check_same_shape(reward_L=reward_L, leaf_node_L=leaf_node_L, group_L=group_L)
    check_rank(parent_N=parent_N)
    if shrinkage is not None and not shrinkage >= 0:
        raise ValueError(f"shrinkage={shrinkage}: expected None or a number of leaves from 0")
    check_nodes(leaf_node_L, parent_N)
    reward64_L = reward_L.double()
    family_L, size_L = group_index_and_size(group_L)  # the parent; above the roots, the prompt
    above_L = group_sum(reward64_L, family_L) / size_L  # the parent's value
    advantage_N = reward64_L.new_zeros(len(parent_N))
    for on_L, node_M in ancestors_from_roots(leaf_node_L, parent_N):
        advantage_M = _shrunk_differences(
            reward64_L[on_L], above_L[on_L], node_M, family_L[on_L], shrinkage
        )
        advantage_N[node_M] = advantage_M
        above_L = above_L.masked_scatter(on_L, above_L[on_L] + advantage_M)
        family_L = family_L.masked_scatter(on_L, node_M)
    return advantage_N.to(reward_L.dtype)


def tree_grpo(
    reward_L: torch.Tensor,
    root_L: torch.Tensor,
    group_L: torch.Tensor,
    *,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Return the sum of the advantages in the leaf's tree and among all trees of its prompt, [L].

    Each is (r - mean) / std (Tree-GRPO, arXiv 2509.21240); in a tree with a single leaf there is
    nothing to compare, and its part is 0.

    Args:
        reward_L: [L] reward of each leaf.
        root_L: [L] tree of each leaf.
        group_L: [L] prompt of each leaf.
        norm_by_std: whether to divide by the standard deviations.
    """
    in_tree_L = grpo(reward_L, root_L, norm_by_std=norm_by_std)
    _, num_leaves_L = group_index_and_size(root_L)
    among_trees_L = grpo(reward_L, group_L, norm_by_std=norm_by_std)
    return among_trees_L + in_tree_L.where(num_leaves_L > 1, 0.0)


def _shrunk_differences(
    reward_M: torch.Tensor,
    above_M: torch.Tensor,
    node_M: torch.Tensor,
    family_M: torch.Tensor,
    shrinkage: float | None,
) -> torch.Tensor:
    """Return the advantage of each leaf's node at one depth, [M].

    Args:
        reward_M: [M] float64 rewards of the leaves that have a node at this depth.
        above_M: [M] float64 values of the parents of these nodes.
        node_M: [M] nodes.
        family_M: [M] parents of the nodes.
        shrinkage: As in `fork_advantages`.
    """
    index_M, size_M = group_index_and_size(node_M)
    mean_M = group_sum(reward_M, index_M) / size_M
    difference_M = mean_M - above_M
    if shrinkage is not None:
        return difference_M * size_M / (size_M + shrinkage)
    family_M, num_leaves_M = group_index_and_size(family_M)
    num_children_M = group_sum(1.0 / size_M.double(), family_M).round()
    spread_M = group_sum((reward_M - mean_M).square(), family_M)
    variance_M = spread_M / (num_leaves_M - num_children_M).clamp(min=1)
    # The sum over children with weight n is one over leaves.
    distance_M = group_sum(difference_M.square(), family_M)
    is_known_M = (num_children_M > 2) & (num_leaves_M > num_children_M) & (distance_M > 0)
    factor_M = 1 - (num_children_M - 2) * variance_M / distance_M.where(is_known_M, 1.0)
    return difference_M * factor_M.clamp(min=0).where(is_known_M, 1.0)


def ancestors_from_roots(
    leaf_node_L: torch.Tensor, parent_N: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield, by depth, which leaves have an ancestor there, [L], and the ancestors of those, [M].

    Raises:
        ValueError: A parent is its own descendant.
    """
    paths: list[torch.Tensor] = []  # ancestors of all leaves by height above the leaf
    node_L = leaf_node_L
    while bool((node_L >= 0).any()):
        if len(paths) > len(parent_N):
            raise ValueError("parent_N has a cycle, expected trees")
        paths.append(node_L)
        node_L = torch.where(node_L >= 0, parent_N[node_L.clamp(min=0)], -1)
    height_L = torch.stack([(path_L >= 0).long() for path_L in paths]).sum(0)
    path_HL = torch.stack(paths)
    for depth in range(len(paths)):
        on_L = height_L > depth
        up_L = (height_L - 1 - depth).clamp(min=0)
        yield on_L, path_HL.gather(0, up_L.unsqueeze(0)).squeeze(0)[on_L]


def check_nodes(leaf_node_L: torch.Tensor, parent_N: torch.Tensor) -> None:
    """Raise `ValueError` unless the node of each leaf and each parent exist."""
    num_nodes = len(parent_N)
    for name, node, low in (("leaf_node_L", leaf_node_L, 0), ("parent_N", parent_N, -1)):
        if node.numel() and not low <= int(node.min()) <= int(node.max()) < num_nodes:
            raise ValueError(
                f"{name} has nodes from {int(node.min())} to {int(node.max())}, expected {low} to "
                f"{num_nodes - 1}, for {num_nodes} nodes"
            )

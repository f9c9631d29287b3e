"""Advantages of the nodes of rollout trees, from the rewards of their leaves.

At a fork several trajectories continue one history, of which the tokens and the state of the
sandbox are the same for all of them. A *node* is a run of tokens that the same trajectories share,
from one fork to the next. The mean reward of the leaves below a node is an unbiased estimate of the
value of the state at its end, and the difference to the value of the parent estimates the advantage
of the node's tokens. Methods that group similar states of independent trajectories (GiGPO, arXiv
2505.10978) approximate what is exact here.

L leaves, that is trajectories; N nodes; B rows; T response positions; M unmasked positions, or
leaves that have a node at some depth. Sums run in float64. Results carry no gradient and are not
whitened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from mega_agentrl.algo.advantage import group_index_and_size, group_sum, grpo
from mega_agentrl.algo.shape_checks import check_rank, check_same_shape
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The nodes of the trees whose paths are the rows of a batch."""

    node_BT: torch.Tensor
    """[B, T] int64 node of each unmasked token, -1 where masked."""
    parent_N: torch.Tensor
    """[N] int64 parent of each node, -1 for roots."""
    leaf_node_B: torch.Tensor
    """[B] int64 node of each row's last unmasked token, -1 if it has none."""
    root_B: torch.Tensor
    """[B] int64 node of each row's first unmasked token, -1 if it has none."""


def token_tree(tree_token_BT: torch.Tensor, mask_BT: torch.Tensor) -> TokenTree:
    """Return the nodes of the trees that rows with common tokens form.

    A node is a longest run of unmasked tokens that belong to the same rows: it ends where one of
    these rows forks off or ends. Rows of different prompts must have different tokens.

    Args:
        tree_token_BT: [B, T] integer id of the tree token; equal ids mean the same sampled token.
        mask_BT: [B, T] mask; masked positions belong to no node.
    """
    check_same_shape(tree_token_BT=tree_token_BT, mask_BT=mask_BT)
    mask_BT = mask_BT.bool()
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    # Position of the last unmasked token up to here, and before here; -1 if there is none.
    last_BT = torch.where(mask_BT, position_T, -1).cummax(1).values
    previous_BT = pad(last_BT[:, :-1], (1, 0), value=-1)

    _, token_M, num_rows_of_token = torch.unique(
        tree_token_BT[mask_BT], return_inverse=True, return_counts=True
    )
    token_BT = torch.full_like(tree_token_BT, -1, dtype=torch.int64).masked_scatter(
        mask_BT, token_M
    )
    num_rows_BT = torch.zeros_like(token_BT).masked_scatter(mask_BT, num_rows_of_token[token_M])
    # A new node starts where the number of rows changes: the rows that share a token also share
    # all tokens before it.
    is_start_BT = mask_BT & (
        (previous_BT < 0) | (num_rows_BT != num_rows_BT.gather(1, previous_BT.clamp(min=0)))
    )
    start_BT = torch.where(is_start_BT, position_T, 0).cummax(1).values
    first_token_M = token_BT.gather(1, start_BT)[mask_BT]
    first_token_N, node_M = torch.unique(first_token_M, return_inverse=True)
    node_BT = torch.full_like(token_BT, -1).masked_scatter(mask_BT, node_M)

    parent_N = first_token_N.new_full((len(first_token_N),), -1)
    parent_BT = torch.where(previous_BT < 0, -1, node_BT.gather(1, previous_BT.clamp(min=0)))
    parent_N[node_BT[is_start_BT]] = parent_BT[is_start_BT]
    # For a row without unmasked tokens both read position 0, where `node_BT` is -1.
    leaf_node_B = node_BT.gather(1, last_BT[:, -1:].clamp(min=0)).squeeze(1)
    root_B = node_BT.gather(1, mask_BT.int().argmax(1, keepdim=True)).squeeze(1)
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

    Values are estimated from the roots down. The value of a node with n leaves below it, whose mean
    reward is m, under a parent of value v, is

        v + n / (n + shrinkage) * (m - v)

    where for a root v is the mean reward of all leaves of the prompt. So the value of a node with
    few leaves stays close to that of its parent. If `shrinkage` is None, the factor n / (n +
    shrinkage) is replaced by that of the positive-part James-Stein estimate. For the k children of
    one parent (the roots are the children of the prompt), where s^2 is the pooled variance of the
    rewards of each child's leaves around the child's m, this factor is

        max(0, 1 - (k - 2) / sum_children(n * (m - v)^2 / s^2))

    or 1 if k < 3, or if no child has two leaves, because s^2 is then unknown. A node without a leaf
    below it has the value of its parent.

    Args:
        reward_L: [L] reward of each leaf.
        leaf_node_L: [L] int64 node that each leaf ends in; the node may have children, too.
        parent_N: [N] int64 parent of each node, -1 for roots.
        shrinkage: Number of leaves with which the value of a node is halfway between the value of
            its parent and the mean reward of its leaves, at least 0; None for the James-Stein
            estimate (Efron and Morris, 1973).
        group_L: [L] prompt of each leaf; all leaves below a root have the same prompt. None if all
            leaves belong to one prompt.

    Raises:
        ValueError: A shape is wrong, a node does not exist, a parent is its own descendant, or
            `shrinkage` is negative.
    """
    if group_L is None:
        group_L = torch.zeros_like(leaf_node_L)
    check_same_shape(reward_L=reward_L, leaf_node_L=leaf_node_L, group_L=group_L)
    check_rank(parent_N=parent_N)
    if shrinkage is not None and not shrinkage >= 0:
        raise InputError("shrinkage", shrinkage, "None or at least 0 leaves")
    check_nodes(leaf_node_L, parent_N)
    reward64_L = reward_L.double()
    # The node above the current depth on each leaf's path, and its value; above the roots, those of
    # the prompt.
    parent_L, size_L = group_index_and_size(group_L)
    parent_value_L = group_sum(reward64_L, parent_L) / size_L
    advantage_N = reward64_L.new_zeros(len(parent_N))
    for has_node_L, node_M in ancestors_from_roots(leaf_node_L, parent_N):
        advantage_M = _shrunk_differences(
            reward64_L[has_node_L],
            parent_value_L[has_node_L],
            node_M,
            parent_L[has_node_L],
            shrinkage,
        )
        advantage_N[node_M] = advantage_M
        parent_value_L = parent_value_L.masked_scatter(
            has_node_L, parent_value_L[has_node_L] + advantage_M
        )
        parent_L = parent_L.masked_scatter(has_node_L, node_M)
    return advantage_N.to(reward_L.dtype)


def tree_grpo(
    reward_L: torch.Tensor,
    root_L: torch.Tensor,
    group_L: torch.Tensor,
    *,
    norm_by_std: bool = True,
) -> torch.Tensor:
    """Return the sum of a leaf's advantages in its tree and in its prompt, [L].

    Each advantage is (r - mean) / std, over the leaves of the tree and over all leaves of the
    prompt (Tree-GRPO, arXiv 2509.21240). The advantage in a tree with a single leaf is 0, because
    there is nothing to compare.

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
    parent_value_M: torch.Tensor,
    node_M: torch.Tensor,
    parent_M: torch.Tensor,
    shrinkage: float | None,
) -> torch.Tensor:
    """Return the advantage of each leaf's node at one depth, [M] float64.

    Args:
        reward_M: [M] float64 rewards of the leaves that have a node at this depth.
        parent_value_M: [M] float64 values of the parents of these nodes.
        node_M: [M] nodes.
        parent_M: [M] parents of the nodes.
        shrinkage: As in `fork_advantages`.
    """
    index_M, size_M = group_index_and_size(node_M)
    mean_M = group_sum(reward_M, index_M) / size_M
    difference_M = mean_M - parent_value_M
    if shrinkage is not None:
        return difference_M * size_M / (size_M + shrinkage)
    parent_index_M, num_leaves_M = group_index_and_size(parent_M)
    num_children_M = group_sum(1.0 / size_M.double(), parent_index_M).round()
    spread_M = group_sum((reward_M - mean_M).square(), parent_index_M)
    variance_M = spread_M / (num_leaves_M - num_children_M).clamp(min=1)
    # A sum over leaves counts every child n times, once for each of its leaves.
    distance_M = group_sum(difference_M.square(), parent_index_M)
    is_known_M = (num_children_M > 2) & (num_leaves_M > num_children_M) & (distance_M > 0)
    factor_M = 1 - (num_children_M - 2) * variance_M / distance_M.where(is_known_M, 1.0)
    return difference_M * factor_M.clamp(min=0).where(is_known_M, 1.0)


def ancestors_from_roots(
    leaf_node_L: torch.Tensor, parent_N: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the ancestors of the leaves at each depth, from the roots down.

    The node that a leaf ends in counts as its last ancestor.

    Args:
        leaf_node_L: [L] int64 node that each leaf ends in.
        parent_N: [N] int64 parent of each node, -1 for roots.

    Yields:
        An [L] bool mask of the leaves with an ancestor at this depth, and the [M] int64 ancestors
        of these M leaves.

    Raises:
        ValueError: A parent is its own descendant.
    """
    paths: list[torch.Tensor] = []  # [L] ancestors by height above the leaf, -1 above the root
    node_L = leaf_node_L
    while bool((node_L >= 0).any()):
        if len(paths) > len(parent_N):
            raise InputError("parent_N", "a cycle", "trees")
        paths.append(node_L)
        node_L = torch.where(node_L >= 0, parent_N[node_L.clamp(min=0)], -1)
    num_ancestors_L = torch.stack([(path_L >= 0).long() for path_L in paths]).sum(0)
    path_HL = torch.stack(paths)
    for depth in range(len(paths)):
        has_node_L = num_ancestors_L > depth
        height_L = (num_ancestors_L - 1 - depth).clamp(min=0)
        yield has_node_L, path_HL.gather(0, height_L.unsqueeze(0)).squeeze(0)[has_node_L]


def check_nodes(leaf_node_L: torch.Tensor, parent_N: torch.Tensor) -> None:
    """Raise `ValueError` unless the node of every leaf and the parent of every node exist."""
    num_nodes = len(parent_N)
    for name, node, low in (("leaf_node_L", leaf_node_L, 0), ("parent_N", parent_N, -1)):
        if node.numel() and not low <= int(node.min()) <= int(node.max()) < num_nodes:
            got = (int(node.min()), int(node.max()))
            expected = f"nodes from {low} to {num_nodes - 1}, for {num_nodes} nodes"
            raise InputError(name, got, expected)

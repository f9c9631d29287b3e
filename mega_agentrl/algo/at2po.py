"""AT2PO: values of the turns of a rollout tree, from the leaves up (arXiv 2601.04767).

The leaves' rewards are normalised over the tree, and the value of a turn is the mean of its
children's values, weighted by the softmax of their entropies. The paper uses the value itself as
the turn's advantage. The weights, the normalisation and the use of the value as the advantage are
those of the code that was released with the paper, with the published settings.

L leaves, that is trajectories; N nodes; M leaves with a node at some depth; C nodes at this depth
that have a parent.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.advantage import group_z_score
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.algo.tree_credit import ancestors_from_roots, check_nodes


def at2po(
    reward_L: torch.Tensor,
    group_L: torch.Tensor,
    leaf_node_L: torch.Tensor,
    parent_N: torch.Tensor,
    entropy_N: torch.Tensor,
) -> torch.Tensor:
    """Return the value of each node, [N], 0 for nodes without a leaf below them.

    The value of a leaf is (r - mean) / (std + 1e-6), with the biased std of all leaves of the
    prompt, and that of a node is sum_c softmax(H)_c V_c over its children c. A turn that is not
    followed by a fork has the value of the next turn, so a node may hold several turns
    (`tree_credit.token_tree`); its entropy is then that of the first turn.

    In the paper only turns without children are leaves. Here a leaf may end in a node that other
    trajectories continue; the leaf then counts as a child with entropy 0.

    Args:
        reward_L: [L] reward of each leaf.
        group_L: [L] prompt of each leaf, whose roots make up one tree.
        leaf_node_L: [L] int64 node that each leaf ends in.
        parent_N: [N] int64 parent of each node, -1 for roots.
        entropy_N: [N] entropy of each node in nats.

    Raises:
        ValueError: A shape is wrong, a node does not exist, or a parent is its own descendant.
    """
    check_same_shape(reward_L=reward_L, group_L=group_L, leaf_node_L=leaf_node_L)
    check_same_shape(parent_N=parent_N, entropy_N=entropy_N)
    check_nodes(leaf_node_L, parent_N)
    weight_N = entropy_N.double().exp()
    total_N = torch.zeros_like(weight_N).index_add(0, leaf_node_L, group_z_score(reward_L, group_L))
    weight_sum_N = torch.zeros_like(weight_N).index_add(
        0, leaf_node_L, torch.ones_like(leaf_node_L, dtype=torch.float64)
    )
    for _, node_M in reversed(list(ancestors_from_roots(leaf_node_L, parent_N))):
        child_C = torch.unique(node_M)
        child_C = child_C[parent_N[child_C] >= 0]
        value_C = total_N[child_C] / weight_sum_N[child_C]
        total_N = total_N.index_add(0, parent_N[child_C], weight_N[child_C] * value_C)
        weight_sum_N = weight_sum_N.index_add(0, parent_N[child_C], weight_N[child_C])
    return (total_N / weight_sum_N.where(weight_sum_N > 0, 1.0)).to(reward_L.dtype)

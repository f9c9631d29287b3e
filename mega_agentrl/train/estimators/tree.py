"""Estimators that read the tree: which trajectories share which tokens.

Without forks they are estimators over the group. Shape suffixes: A trajectories, L positions of a
whole trajectory, N nodes of the trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo import at2po, tree_credit
from mega_agentrl.algo.masking import number_turns
from mega_agentrl.config.ranges import Range
from mega_agentrl.train.estimators.registry import AdvantageResult, register_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.estimators.registry import AdvantageInputs


@register_advantage("fork_credit", needs_groups=True, supports_kl_in_reward=True)
def _fork_credit(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    shrinkage: Annotated[float | None, Range(at_least=0)] = 1.0,
    norm_by_std: bool = True,
) -> AdvantageResult:
    """Credit from forks: the value of a tree's node less that of the node it was forked from.

    Tokens between two forks have one advantage. Those that several trajectories share are trained
    on once for each of them.

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        shrinkage: Number of leaves at which the value of a node is half that of its parent; null
            for the James-Stein estimate.
        norm_by_std: Divide by the standard deviation of the group's rewards.
    """
    tree = _token_tree(inputs)
    reward_A = estimators.grpo(inputs.reward_A, inputs.group_A, norm_by_std=norm_by_std)
    is_leaf_A = tree.leaf_node_B >= 0
    advantage_N = tree_credit.fork_advantages(
        reward_A[is_leaf_A],
        tree.leaf_node_B[is_leaf_A],
        tree.parent_N,
        shrinkage=shrinkage,
        group_L=inputs.group_A[is_leaf_A],
    )
    return _give_to_tokens(inputs, tree, advantage_N)


@register_advantage("tree_grpo", needs_groups=True, per_trajectory=True, supports_kl_in_reward=True)
def _tree_grpo(
    inputs: AdvantageInputs, algo: AlgoConfig, *, norm_by_std: bool = True
) -> AdvantageResult:
    """Tree-GRPO, relative to the trajectory's tree and to all trees (arXiv 2509.21240).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        norm_by_std: Divide by the standard deviations of the rewards of tree and group.
    """
    return AdvantageResult(
        tree_credit.tree_grpo(
            inputs.reward_A,
            _token_tree(inputs).root_B,
            inputs.group_A,
            norm_by_std=norm_by_std,
        )
    )


@register_advantage("at2po", needs_groups=True, supports_kl_in_reward=True)
def _at2po(
    inputs: AdvantageInputs, algo: AlgoConfig, *, exact_entropy: bool = False
) -> AdvantageResult:
    """AT2PO, the value of each turn in the tree, weighted by entropies (arXiv 2601.04767).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        exact_entropy: Take the engine's exact entropies in place of the paper's estimate from the
            log-probs of the sampled tokens, by which an improbable turn weighs more than another
            one from the same state.
    """
    rows, batch = inputs.rows, inputs.batch
    tree = _token_tree(inputs)
    entropy_BT = batch.rollout_entropy_BT if exact_entropy else -batch.rollout_logp_BT
    is_leaf_A = tree.leaf_node_B >= 0
    value_N = at2po.at2po(
        inputs.reward_A[is_leaf_A],
        inputs.group_A[is_leaf_A],
        tree.leaf_node_B[is_leaf_A],
        tree.parent_N,
        _first_turn_means(tree, rows.concat_rows(entropy_BT, batch.length_B)),
    )
    return _give_to_tokens(inputs, tree, value_N)


def _first_turn_means(tree: tree_credit.TokenTree, value_AL: torch.Tensor) -> torch.Tensor:
    """Return the mean of `value_AL` over the first turn of each node, or its part in the node."""
    on_AL = tree.node_BT >= 0
    node_M, turn_M = tree.node_BT[on_AL], number_turns(on_AL)[on_AL]
    last = on_AL.size(1)
    first_N = torch.full_like(tree.parent_N, last).scatter_reduce(0, node_M, turn_M, "amin")
    is_first_M = turn_M == first_N[node_M]
    node_M, value_M = node_M[is_first_M], value_AL[on_AL][is_first_M]
    zero_N = value_AL.new_zeros(len(first_N))
    total_N = zero_N.index_add(0, node_M, value_M)
    return total_N / zero_N.index_add(0, node_M, torch.ones_like(value_M))


def _give_to_tokens(
    inputs: AdvantageInputs, tree: tree_credit.TokenTree, advantage_N: torch.Tensor
) -> AdvantageResult:
    """Return the advantage of each token's node."""
    on_AL = tree.node_BT >= 0
    advantage_AL = advantage_N.new_zeros(on_AL.shape)
    advantage_AL[on_AL] = advantage_N[tree.node_BT[on_AL]]
    return AdvantageResult(inputs.rows.split_rows(advantage_AL, inputs.batch))


def _token_tree(inputs: AdvantageInputs) -> tree_credit.TokenTree:
    """Return the trees of the trajectories, [A, L]."""
    rows, batch = inputs.rows, inputs.batch
    return tree_credit.token_tree(
        rows.concat_rows(batch.tree_token_BT, batch.length_B),
        rows.concat_rows(batch.mask_BT, batch.length_B),
    )

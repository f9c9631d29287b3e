"""Estimators that read the tree: which trajectories share which tokens.

Without forks they are estimators over the group. Shape suffixes: A trajectories, L positions of a
whole trajectory, N nodes of the trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo import tree_credit
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
    advantage_AL = reward_A.new_zeros(tree.node_BT.shape)
    on_AL = tree.node_BT >= 0
    advantage_AL[on_AL] = advantage_N[tree.node_BT[on_AL]]
    return AdvantageResult(inputs.rows.split_rows(advantage_AL, inputs.batch))


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


def _token_tree(inputs: AdvantageInputs) -> tree_credit.TokenTree:
    """Return the trees of the trajectories, [A, L]."""
    rows, batch = inputs.rows, inputs.batch
    return tree_credit.token_tree(
        rows.concat_rows(batch.tree_token_BT, batch.length_B),
        rows.concat_rows(batch.mask_BT, batch.length_B),
    )

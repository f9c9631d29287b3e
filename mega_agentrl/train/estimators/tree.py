"""Estimators that read the tree: which trajectories share which tokens.

Without forks they are estimators over the group. Shape suffixes: A trajectories, L positions of a
whole trajectory, N nodes of the trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo import appo, at2po, tree_credit
from mega_agentrl.algo.masking import number_turns
from mega_agentrl.config.ranges import Range
from mega_agentrl.train.estimators.registry import AdvantageResult, register_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.estimators.registry import AdvantageInputs


@register_advantage(
    "fork_credit", needs_groups=True, supports_kl_in_reward=True, equal_rewards_give_zero=True
)
def _fork_credit(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    shrinkage: Annotated[float | None, Range(at_least=0)] = 1.0,
    norm_by_std: bool = True,
) -> AdvantageResult:
    """Credit from forks: the value of a tree's node less that of the node it was forked from.

    Tokens between two forks have one advantage. Tokens that several trajectories share are trained
    on once for each of them.

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        shrinkage: Number of leaves at which the value of a node is halfway between its parent's
            value and the mean reward of these leaves; null for the James-Stein estimate.
        norm_by_std: Divide by the standard deviation of the group's rewards.
    """
    tree = _token_tree(inputs)
    reward_A = estimators.grpo(inputs.reward_A, inputs.group_A, norm_by_std=norm_by_std)
    advantage_N = _fork_advantages(inputs, tree, reward_A, shrinkage)
    return AdvantageResult(inputs.rows.split_rows(_to_tokens(tree, advantage_N), inputs.batch))


@register_advantage(
    "tree_grpo",
    needs_groups=True,
    per_trajectory=True,
    supports_kl_in_reward=True,
    equal_rewards_give_zero=True,
)
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
            log-probs of the sampled tokens, by which an improbable turn weighs more than other
            turns from the same state.
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
    return AdvantageResult(rows.split_rows(_to_tokens(tree, value_N), batch))


@register_advantage(
    "appo", needs_groups=True, supports_kl_in_reward=True, equal_rewards_give_zero=True
)
def _appo(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    weight: Annotated[float, Range(at_least=0, at_most=1000)] = 1.0,
    shrinkage: Annotated[float | None, Range(at_least=0)] = 1.0,
    norm_by_std: bool = True,
) -> AdvantageResult:
    """APPO with values: GRPO plus the gain in value at each node of the tree (arXiv 2606.12384).

    The paper multiplies by a future value; adding lets a node that lost value count against the
    trajectory that went through it.

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        weight: Weight of the gain in value.
        shrinkage: Number of leaves at which the value of a node is halfway between its parent's
            value and the mean reward of these leaves; null for the James-Stein estimate.
        norm_by_std: Divide by the standard deviation of the group's rewards.
    """
    tree = _token_tree(inputs)
    reward_A = estimators.grpo(inputs.reward_A, inputs.group_A, norm_by_std=norm_by_std)
    gain_N = _fork_advantages(inputs, tree, reward_A, shrinkage)
    mask_AL = tree.node_BT >= 0
    total_AL = estimators.broadcast(reward_A, mask_AL) + weight * _to_tokens(tree, gain_N)
    return AdvantageResult(inputs.rows.split_rows(total_AL, inputs.batch))


@register_advantage(
    "appo_released", needs_groups=True, supports_kl_in_reward=True, reads_scores=True
)
def _appo_released(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    weight: Annotated[float, Range(at_least=0, at_most=1000)] = 1.0,
    decay_tokens: Annotated[float, Range(above=0)] = 128.0,
    bound: Annotated[float, Range(at_least=0, at_most=10)] = 0.2,
) -> AdvantageResult:
    """APPO's code, whose value is the mismatch of engine and trainer (arXiv 2606.12384).

    The first trajectory of a tree is the initial one, all others are its forks, which are not
    trained on. The release divides its losses by trained tokens only; here those of the forks are
    counted, with advantage 0. Its scale of rewards before the branching point is left out, since it
    multiplies tokens that have no reward. With `algo.loss=future_kl`, as in the preset, weight is
    0: the release has the factor in its loss, and uses the mismatch to choose branching points.

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        weight: Weight of the value: advantages are multiplied by 1 + weight * value.
        decay_tokens: Number of tokens over which the mismatch counts half.
        bound: The value is between 1 and 1 + bound.
    """
    rows, batch = inputs.rows, inputs.batch
    assert batch.old_logp_BT is not None, "the policy scores a batch before its advantages"
    tree = _token_tree(inputs)
    is_leaf_A, is_fork_A = tree.leaf_node_B >= 0, _is_fork(tree)
    base_A = inputs.reward_A.new_zeros(is_leaf_A.shape)
    base_A[is_leaf_A], added_N = appo.dual_group(
        inputs.reward_A[is_leaf_A],
        inputs.group_A[is_leaf_A],
        is_fork_A[is_leaf_A],
        tree.leaf_node_B[is_leaf_A],
        tree.parent_N,
    )
    mask_AL = tree.node_BT >= 0
    total_AL = estimators.broadcast(base_A, mask_AL) + _to_tokens(tree, added_N)
    value_AL = appo.mismatch_value(
        rows.concat_rows(batch.old_logp_BT, batch.length_B),
        rows.concat_rows(batch.rollout_logp_BT, batch.length_B),
        mask_AL,
        gamma=0.5 ** (1 / decay_tokens),
        bound=bound,
    )
    advantage_AL = total_AL * (1 + weight * value_AL)
    advantage_AL = advantage_AL.masked_fill(is_fork_A.unsqueeze(1), 0.0)
    return AdvantageResult(rows.split_rows(advantage_AL, batch))


def _is_fork(tree: tree_credit.TokenTree) -> torch.Tensor:
    """Return whether an earlier trajectory has the same root, [A]."""
    is_leaf_A = tree.root_B >= 0
    place_L = is_leaf_A.nonzero().squeeze(1)
    first_N = torch.full_like(tree.parent_N, len(is_leaf_A)).scatter_reduce(
        0, tree.root_B[is_leaf_A], place_L, "amin"
    )
    return is_leaf_A.masked_scatter(is_leaf_A, first_N[tree.root_B[is_leaf_A]] < place_L)


def _first_turn_means(tree: tree_credit.TokenTree, value_AL: torch.Tensor) -> torch.Tensor:
    """Return the mean of `value_AL` over the first turn of each node, or its part in the node."""
    mask_AL = tree.node_BT >= 0
    node_M, turn_M = tree.node_BT[mask_AL], number_turns(mask_AL)[mask_AL]
    last = mask_AL.size(1)
    first_N = torch.full_like(tree.parent_N, last).scatter_reduce(0, node_M, turn_M, "amin")
    is_first_M = turn_M == first_N[node_M]
    node_M, value_M = node_M[is_first_M], value_AL[mask_AL][is_first_M]
    zero_N = value_AL.new_zeros(len(first_N))
    total_N = zero_N.index_add(0, node_M, value_M)
    return total_N / zero_N.index_add(0, node_M, torch.ones_like(value_M))


def _fork_advantages(
    inputs: AdvantageInputs,
    tree: tree_credit.TokenTree,
    reward_A: torch.Tensor,
    shrinkage: float | None,
) -> torch.Tensor:
    """Return `tree_credit.fork_advantages` of the trajectories that are leaves, [N]."""
    is_leaf_A = tree.leaf_node_B >= 0
    return tree_credit.fork_advantages(
        reward_A[is_leaf_A],
        tree.leaf_node_B[is_leaf_A],
        tree.parent_N,
        shrinkage=shrinkage,
        group_L=inputs.group_A[is_leaf_A],
    )


def _to_tokens(tree: tree_credit.TokenTree, advantage_N: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each token's node, 0 where masked, [A, L]."""
    mask_AL = tree.node_BT >= 0
    advantage_AL = advantage_N.new_zeros(mask_AL.shape)
    advantage_AL[mask_AL] = advantage_N[tree.node_BT[mask_AL]]
    return advantage_AL


def _token_tree(inputs: AdvantageInputs) -> tree_credit.TokenTree:
    """Return the trees of the trajectories, [A, L]."""
    rows, batch = inputs.rows, inputs.batch
    return tree_credit.token_tree(
        rows.concat_rows(batch.tree_token_BT, batch.length_B),
        rows.concat_rows(batch.mask_BT, batch.length_B),
    )

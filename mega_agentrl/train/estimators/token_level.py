"""Estimators with discounted returns of each token.

They put each token's KL into that token's reward. Shape suffixes: B rows, A trajectories, T
response positions, L positions of a whole trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.kl import apply_kl_penalty
from mega_agentrl.algo.masking import masked_sum, masked_whiten
from mega_agentrl.config.ranges import Range
from mega_agentrl.train.estimators.registry import AdvantageResult, register_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.estimators.registry import AdvantageInputs


@register_advantage("reinforce_plus_plus", equal_without_kl=True, supports_kl_in_reward=True)
def _reinforce_plus_plus(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """REINFORCE++, returns whitened over the batch, without groups (arXiv 2501.03262).

    The returns of a row include the KL of the trajectory's later rows.
    """
    batch, kl_BT = inputs.batch, inputs.kl_BT
    reward_B = batch.reward_B
    if kl_BT is not None:
        later_kl_B = inputs.rows.sum_later_rows(masked_sum(kl_BT, batch.mask_BT, 1))
        reward_B = reward_B - inputs.kl_coef * later_kl_B
    reward_BT = _token_rewards(
        reward_B, batch.mask_BT, kl_BT, inputs.kl_coef, batch.rollout_logp_BT.dtype
    )
    return AdvantageResult(estimators.reinforce_plus_plus(reward_BT, batch.mask_BT))


@register_advantage("gae", needs_critic=True, supports_kl_in_reward=True)
def _gae(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    *,
    gamma: Annotated[float, Range(at_least=0, at_most=1)] = 1.0,
    lam: Annotated[float, Range(at_least=0, at_most=1)] = 1.0,
    norm_by_std: bool = True,
) -> AdvantageResult:
    """Generalized advantage estimation, with a critic (arXiv 1506.02438).

    The rows of a trajectory are one sequence.

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        gamma: Discount factor.
        lam: GAE's lambda; with gamma and lam 1 the advantage is the return minus the value.
        norm_by_std: Whiten the advantages of all trained tokens.
    """
    batch, rows = inputs.batch, inputs.rows
    assert batch.value_BT is not None, "add_advantages requires it"
    mask_AL = rows.concat_rows(batch.mask_BT, batch.length_B)
    value_AL = rows.concat_rows(batch.value_BT, batch.length_B)
    kl_AL = None if inputs.kl_BT is None else rows.concat_rows(inputs.kl_BT, batch.length_B)
    reward_AL = _token_rewards(
        batch.reward_B[rows.first_row_A], mask_AL, kl_AL, inputs.kl_coef, value_AL.dtype
    )
    advantage_AL, return_AL = estimators.gae(reward_AL, value_AL, mask_AL, gamma=gamma, lam=lam)
    advantage_BT = rows.split_rows(advantage_AL, batch)
    if norm_by_std:
        advantage_BT = masked_whiten(advantage_BT, batch.mask_BT)
    return AdvantageResult(advantage_BT, rows.split_rows(return_AL, batch).float())


def _token_rewards(
    reward_B: torch.Tensor,
    mask_BT: torch.Tensor,
    kl_BT: torch.Tensor | None,
    kl_coef: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the reward of each token, [B, T]; its sums from the right are the returns.

    The last trained token of a row carries the row's reward, and each token its own KL.
    """
    last_B = mask_BT.size(1) - 1 - mask_BT.flip(1).int().argmax(1)
    reward_BT = torch.zeros(mask_BT.shape, dtype=dtype)
    reward_BT = reward_BT.scatter(1, last_B.unsqueeze(1), reward_B.unsqueeze(1))
    if kl_BT is None:
        return reward_BT
    return apply_kl_penalty(reward_BT, kl_BT, mask_BT, coef=kl_coef)

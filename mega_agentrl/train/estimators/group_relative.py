"""Estimators with one advantage per trajectory, relative to other answers to its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.train.estimators.registry import AdvantageResult, register_advantage

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.train.estimators.registry import AdvantageInputs


@register_advantage(
    "grpo",
    needs_groups=True,
    per_trajectory=True,
    supports_kl_in_reward=True,
    equal_rewards_give_zero=True,
)
def _grpo(
    inputs: AdvantageInputs, algo: AlgoConfig, *, norm_by_std: bool = True
) -> AdvantageResult:
    """GRPO, the reward relative to the group (arXiv 2402.03300).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        norm_by_std: Divide by the standard deviation of the group; false is Dr. GRPO.
    """
    return AdvantageResult(
        estimators.grpo(inputs.reward_A, inputs.group_A, norm_by_std=norm_by_std)
    )


@register_advantage(
    "arpo_hard",
    needs_groups=True,
    per_trajectory=True,
    averages_shared_tokens=True,
    supports_kl_in_reward=True,
    equal_rewards_give_zero=True,
)
def _arpo_hard(
    inputs: AdvantageInputs, algo: AlgoConfig, *, norm_by_std: bool = True
) -> AdvantageResult:
    """ARPO's hard estimator, GRPO averaged over the paths that share a token (arXiv 2507.19849).

    Args:
        inputs: The batch.
        algo: Settings of the algorithm.
        norm_by_std: Divide by the standard deviation of the group.
    """
    return _grpo(inputs, algo, norm_by_std=norm_by_std)


@register_advantage(
    "rloo",
    needs_groups=True,
    per_trajectory=True,
    supports_kl_in_reward=True,
    equal_rewards_give_zero=True,
)
def _rloo(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """RLOO, the reward minus the mean of the group's other rewards (arXiv 2402.14740)."""
    return AdvantageResult(estimators.rloo(inputs.reward_A, inputs.group_A))


@register_advantage(
    "remax", needs_greedy_baseline=True, per_trajectory=True, supports_kl_in_reward=True
)
def _remax(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """ReMax, the reward minus that of a greedy answer (arXiv 2310.10505).

    If the greedy answer failed, the baseline is the mean of the group's other rewards. Either
    baseline is independent of the trajectory itself.
    """
    assert inputs.batch.baseline_B is not None, "add_advantages requires it"
    reward_A, greedy_A = inputs.reward_A, inputs.batch.baseline_B[inputs.rows.first_row_A]
    others_A = reward_A - estimators.rloo(reward_A, inputs.group_A)
    return AdvantageResult(
        estimators.remax(reward_A, torch.where(greedy_A.isnan(), others_A, greedy_A))
    )


@register_advantage(
    "reinforce_plus_plus_baseline",
    needs_groups=True,
    per_trajectory=True,
    supports_kl_in_reward=True,
)
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs, algo: AlgoConfig) -> AdvantageResult:
    """REINFORCE++ with the mean of the group as baseline, whitened over the batch."""
    mask_AL = inputs.rows.concat_rows(inputs.batch.mask_BT, inputs.batch.length_B)
    white_AL = estimators.reinforce_plus_plus_baseline(inputs.reward_A, inputs.group_A, mask_AL)
    return AdvantageResult(masked_mean(white_AL, mask_AL, 1))

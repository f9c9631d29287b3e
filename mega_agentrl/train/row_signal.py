"""Finds the rows of a batch that can change the policy.

The others are neither scored nor trained on.

Where the loss of a token has the advantage as a factor (`LossTraits.is_zero_without_advantage`) and
neither a KL term nor an entropy bonus, a row whose advantages are all 0 has the loss 0 and the
gradient 0. Its tokens still count in the denominators of the loss, so leaving it out changes the
update only by the order in which sums are rounded, and with `deterministic=true` not at all
(`batch.row_sharding.RowSharder.keeps_order`).

A group whose rewards are equal has no advantages. Where they depend on nothing but the rewards,
such a group is found before the policy scores the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.advantage import group_index_and_size

if TYPE_CHECKING:
    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch


def rows_with_signal(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor | None:
    """Return the rows to train on, [B] bool; None if rows without advantages have a loss, too.

    Args:
        batch: A batch with advantages.
        algo: Settings of the algorithm.
    """
    if not algo.is_zero_without_advantage:
        return None
    assert batch.advantage_BT is not None, "they are computed before"
    has_signal_B: torch.Tensor = ((batch.advantage_BT != 0) & batch.mask_BT).any(1)
    assert batch.is_scored_B is None or not (has_signal_B & ~batch.is_scored_B).any(), (
        "equal_rewards_give_zero is a trait of the estimator"
    )
    return has_signal_B


def rows_to_score(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor | None:
    """Return the rows whose advantages may differ from 0, [B] bool; None if that is unknown.

    Args:
        batch: A batch with all of its rewards, and nothing computed from it.
        algo: Settings of the algorithm.
    """
    if not (algo.is_zero_without_advantage and algo.has_signal_from_rewards):
        return None
    index_B, _ = group_index_and_size(batch.group_B)
    # Rows without a trained token are in no comparison.
    is_compared_B, reward_B = batch.mask_BT.any(1), batch.reward_B
    extremes = [
        torch.full_like(reward_B, fill).scatter_reduce(
            0, index_B[is_compared_B], reward_B[is_compared_B], reduce
        )
        for reduce, fill in (("amin", torch.inf), ("amax", -torch.inf))
    ]
    return is_compared_B & (extremes[0] < extremes[1])[index_B]

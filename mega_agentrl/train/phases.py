"""The verbs of the loop: collect, advantages, report values. Each reads its inputs and returns.

Order within a step: collect -> pack -> log-probs -> advantages -> update -> send weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from mega_agentrl.algo import advantage as estimators
from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.config.choices import Advantage
from mega_agentrl.rollout.collector import collect

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.policy_schema import AlgoConfig
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.parts import Parts
    from mega_agentrl.types.records import Prompt, RolloutTree


def collect_trees(
    parts: Parts, config: TrainConfig, prompts: Sequence[Prompt], step: int
) -> list[RolloutTree]:
    """Rollout trees of the prompts, scored, `rollout.num_trajectories` leaves each."""
    return parts.wait(
        collect(
            prompts,
            generator=parts.generator,
            tools=parts.tools,
            codec=parts.codec,
            interactions=parts.interactions,
            rubric=parts.rubric,
            config=config.rollout,
            max_model_len=config.engine.max_model_len,
            seed=config.seed,
            step=f"train-{step}",
        )
    )


def add_advantages(batch: TrainBatch, algo: AlgoConfig) -> TrainBatch:
    """Fill `advantage_BT` [B, T] float32 from `reward_B` by the configured estimator."""
    reward_B, group_B, mask_BT = batch.reward_B, batch.group_B, batch.mask_BT
    match algo.advantage:
        case Advantage.grpo:
            advantage_B = estimators.grpo(reward_B, group_B, norm_by_std=algo.norm_by_std)
            advantage_BT = estimators.broadcast(advantage_B, mask_BT)
        case Advantage.rloo:
            advantage_BT = estimators.broadcast(estimators.rloo(reward_B, group_B), mask_BT)
        case Advantage.arpo_hard:
            advantage_B = estimators.grpo(reward_B, group_B, norm_by_std=algo.norm_by_std)
            advantage_BT = estimators.arpo_hard(advantage_B, batch.node_BT, mask_BT)
        case _:
            assert_never(algo.advantage)
    return batch.with_fields(advantage_BT=advantage_BT)


def mismatch_metrics(batch: TrainBatch) -> dict[str, float]:
    """How far the engine's log-probs and entropies are from the actor's, over trained tokens.

    Absolute differences in nats of log-prob and of entropy, mean and max.
    """
    assert batch.old_logp_BT is not None and batch.entropy_BT is not None
    mask_BT = batch.mask_BT
    logp_gap_BT = _where(mask_BT, (batch.rollout_logp_BT - batch.old_logp_BT).abs())
    entropy_gap_BT = _where(mask_BT, (batch.rollout_entropy_BT - batch.entropy_BT).abs())
    return {
        "mismatch/logp_mean_abs": float(masked_mean(logp_gap_BT, mask_BT)),
        "mismatch/logp_max_abs": float(logp_gap_BT.max()),
        "mismatch/entropy_mean_abs": float(masked_mean(entropy_gap_BT, mask_BT)),
        "mismatch/entropy_max_abs": float(entropy_gap_BT.max()),
    }


def _where(mask_BT: torch.Tensor, value_BT: torch.Tensor) -> torch.Tensor:
    return value_BT.masked_fill(~mask_BT, 0.0)

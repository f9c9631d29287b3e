"""The critic's part of a step: values before the advantages, an update beside the policy's.

In the first `optim.critic_warmup_steps` RL steps only the critic is updated, because advantages
from an untrained critic would be noise to the policy. Without a critic only the policy is updated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.types.batch import UpdateStats

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.train_inputs import TrainInputs
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.components import Components


def add_values(components: Components, batch: TrainBatch) -> TrainBatch:
    """Fill `value_BT`; without a critic the batch is returned unchanged."""
    return batch if components.critic is None else components.critic.compute_values(batch)


def update_models(
    components: Components, config: TrainConfig, train_inputs: TrainInputs, step: int
) -> tuple[UpdateStats, dict[str, float]]:
    """Update the policy and the critic once.

    Returns:
        The policy's statistics, and the critic's metrics, empty without a critic: `critic/loss`,
        `critic/explained_variance` (of the values before the update; NaN if the returns do not
        vary), `critic/clipfrac` (fraction of tokens), `critic/value_mean`, `critic/return_mean`,
        `critic/grad_norm`, `critic/num_skipped_steps` (non-finite gradients) and `critic/is_warmup`
        (1 if the policy was not updated).
    """
    if components.critic is None:
        return components.policy.update(train_inputs.batch, train_inputs.kl_weight_BT), {}
    critic_stats = components.critic.update(train_inputs.batch)
    is_warmup = step <= config.optim.critic_warmup_steps
    policy_stats = (
        skipped_update_stats(config)
        if is_warmup
        else components.policy.update(train_inputs.batch, train_inputs.kl_weight_BT)
    )
    return policy_stats, {
        "critic/loss": critic_stats.metrics["value_loss"],
        "critic/explained_variance": critic_stats.metrics["explained_variance"],
        "critic/clipfrac": critic_stats.metrics["value_clipfrac"],
        "critic/value_mean": critic_stats.metrics["value"],
        "critic/return_mean": critic_stats.metrics["return"],
        "critic/grad_norm": critic_stats.grad_norm,
        "critic/num_skipped_steps": float(critic_stats.num_skipped_steps),
        "critic/is_warmup": float(is_warmup),
    }


def skipped_update_stats(config: TrainConfig) -> UpdateStats:
    """Return the statistics of a policy that is not updated: all steps count as skipped."""
    return UpdateStats(
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        num_tokens=0,
        num_skipped_steps=config.optim.num_minibatches,
        metrics={},
    )

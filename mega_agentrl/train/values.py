"""The critic's part of a step: values before the advantages, an update beside the policy's.

In the first `optim.critic_warmup_steps` RL steps the critic alone is updated: advantages from
values that know nothing yet would teach the policy noise. Without a critic all of it is the
policy's update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.types.batch import UpdateStats

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.steering import Lesson
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.parts import Parts


def add_values(parts: Parts, batch: TrainBatch) -> TrainBatch:
    """The batch with `value_BT`; as it was without a critic."""
    return batch if parts.critic is None else parts.critic.add_values(batch)


def update_models(
    parts: Parts, config: TrainConfig, lesson: Lesson, step: int
) -> tuple[UpdateStats, dict[str, float]]:
    """One update of all that is trained; what the policy's says, and the critic's metrics.

    Metrics: `value/loss`, `value/explained_variance` (of the values from before the update, NaN
    where the returns do not vary), `value/clipped` (share of tokens), `value/mean`,
    `value/return`, `value/grad_norm`, `value/num_skipped` (steps with non-finite gradients) and
    `value/warmup` (1 where the policy was left as it is). Empty without a critic.
    """
    if parts.critic is None:
        return parts.policy.update(lesson.batch, lesson.kl_weight_BT), {}
    said = parts.critic.update(lesson.batch)
    is_warmup = step <= config.optim.critic_warmup_steps
    stats = (
        left_alone(config) if is_warmup else parts.policy.update(lesson.batch, lesson.kl_weight_BT)
    )
    return stats, {
        "value/loss": said.metrics["value_loss"],
        "value/explained_variance": said.metrics["explained_variance"],
        "value/clipped": said.metrics["value_clipfrac"],
        "value/mean": said.metrics["value"],
        "value/return": said.metrics["return"],
        "value/grad_norm": said.grad_norm,
        "value/num_skipped": float(said.num_skipped),
        "value/warmup": float(is_warmup),
    }


def left_alone(config: TrainConfig) -> UpdateStats:
    """What a policy that is not updated says: all of its steps were left out."""
    return UpdateStats(
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        num_tokens=0,
        num_skipped=config.optim.num_minibatches,
        metrics={},
    )

"""Compute log-probs and values, update the models, profile chosen steps, and sync the weights.

In the first `optim.critic_warmup_steps` RL steps only the critic is updated, because advantages
from an untrained critic are noise. Without a critic only the policy is updated.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.types.batch import UpdateStats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.algorithm import TrainInputs
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.components import Components

PROFILE_DIR = "profile"


class ModelUpdater:
    """The trained models: the policy, and the critic if there is one."""

    def __init__(self, components: Components, config: TrainConfig) -> None:
        self._components = components
        self._config = config

    def compute_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Fill log-probs and entropies if the run has such a pass, and with a critic `value_BT`."""
        if self._config.has_scoring_pass:
            batch = self._components.policy.compute_log_probs(batch)
        critic = self._components.critic
        return batch if critic is None else critic.compute_values(batch)

    def update(self, train_inputs: TrainInputs, step: int) -> tuple[UpdateStats, dict[str, float]]:
        """Update the policy and the critic once.

        Returns:
            The policy's statistics, and the critic's metrics, empty without a critic:
            `critic/loss`, `critic/explained_variance` (of the values before the update; NaN if the
            returns do not vary), `critic/clipfrac` (fraction of tokens), `critic/value_mean`,
            `critic/return_mean`, `critic/grad_norm`, `critic/num_skipped_steps` (non-finite
            gradients) and `critic/is_warmup` (1 if the policy was not updated).
        """
        critic = self._components.critic
        if critic is None:
            return self._update_policy(train_inputs), {}
        critic_stats = critic.update(train_inputs.batch)
        is_warmup = step <= self._config.optim.critic_warmup_steps
        policy_stats = (
            self._skipped_update_stats() if is_warmup else self._update_policy(train_inputs)
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

    def _update_policy(self, train_inputs: TrainInputs) -> UpdateStats:
        return self._components.policy.update(
            train_inputs.batch, train_inputs.kl_weight_BT, train_inputs.has_signal_B
        )

    def sync_weights(self) -> Mapping[str, float]:
        """Send the policy's weights to the engines as their next version; return metrics."""
        generator = self._components.generator
        return self._components.policy.sync_weights(generator, generator.version + 1)

    def _skipped_update_stats(self) -> UpdateStats:
        """Return the statistics of a policy that is not updated: all steps count as skipped."""
        return UpdateStats(
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.0,
            num_tokens=0,
            num_skipped_steps=self._config.optim.num_minibatches,
            metrics={},
        )


class Profiler:
    """Profiles log-prob pass and update of the steps in `report.profile_steps`, on rank 0.

    The result is a Chrome trace (`chrome://tracing`, https://ui.perfetto.dev) in
    ``profile/step-<n>-rank0.json`` of the run folder. Profiling slows the step down; a step that
    fails leaves no file.
    """

    def __init__(self, components: Components, config: TrainConfig) -> None:
        self._policy = components.policy
        self._steps = config.report.profile_steps
        self._profile_dir = Path(config.run_dir) / PROFILE_DIR

    def start(self, step: int) -> None:
        """Start the profile if this step is to be profiled."""
        if step in self._steps:
            self._policy.start_profile()

    def stop(self, step: int) -> None:
        """End the profile if this step is to be profiled, and write its file."""
        if step in self._steps:
            self._policy.stop_profile(self._profile_dir / f"step-{step}-rank0.json")

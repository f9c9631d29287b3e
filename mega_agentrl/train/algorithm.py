"""The algorithm of a run: from scored rollouts to the inputs of an update, and its state.

Before the update, ARES shapes the rewards, importance weights and advantages are filled in, and
the KL term gets its weights. After it, the controllers are updated with the training rollouts and
the measured KL. Nothing here waits for a remote call. The formulas are in `algo`, the steps of each
method in `ares`, `advantages` and `controllers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import AresMode, FilterMetric, KlPlacement, RouterReplay
from mega_agentrl.rollout.groups.scoring import valid_scores
from mega_agentrl.train.advantages import (
    add_advantages,
    add_importance_weights,
    check_zero_mismatch,
)
from mega_agentrl.train.ares.bootstrap import format_bootstrap_summary, run_bootstrap
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.shaping import (
    AresStep,
    add_entropy_rewards,
    ares_metrics,
    build_rules,
    mean_ref_kl,
    start_ares_step,
    token_kl_weights,
    update_controllers,
)
from mega_agentrl.train.controllers import adaptive_kl_weights, initial_controllers, update_kl
from mega_agentrl.train.row_signal import rows_to_score, rows_with_signal
from mega_agentrl.train.trajectory_rows import count_trained_trajectories

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.run_logger import RunLogger
    from mega_agentrl.types.batch import TrainBatch, UpdateScores, UpdateStats
    from mega_agentrl.types.components import Components


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """A batch that is ready for the update."""

    batch: TrainBatch
    kl_weight_BT: torch.Tensor | None
    """[B, T] float32 weight of each token's KL; None uses `algo.kl_coef` throughout."""
    ares_step: AresStep | None
    """Statistics and rewards of ARES; None without it."""
    has_signal_B: torch.Tensor | None = None
    """[B] bool, the rows to train on; None for all (`row_signal`)."""
    metrics: dict[str, float] = field(default_factory=dict)

    def with_scores(self, scores: UpdateScores | None) -> TrainInputs:
        """Return the inputs with the log-probs of the update; None for those of a scoring pass."""
        if scores is None:
            return self
        return replace(
            self,
            batch=self.batch.with_fields(
                old_logp_BT=scores.logp_BT,
                entropy_BT=scores.entropy_BT,
                is_scored_B=scores.is_scored_B,
            ),
        )


class Algorithm:
    """Computes the advantages of each step, and holds the controllers across steps."""

    def __init__(
        self, components: Components, config: TrainConfig, controllers: Controllers
    ) -> None:
        """Start from `controllers`, and exclude the prompts that are mastered by then."""
        self.controllers = controllers
        """State after the last step; replaced as a whole, never changed in place."""
        self._components = components
        self._config = config
        self._exclude_mastered_prompts()

    def select_rows_to_score(self, batch: TrainBatch) -> TrainBatch:
        """Fill `is_scored_B` of a batch that has all of its rewards, if they say which rows count.

        A proof that engine and policy agree, and routes that are recorded, are about all rows.
        """
        model = self._config.model
        is_needed = model.zero_mismatch or model.router_replay is RouterReplay.old
        if is_needed or model.has_router_loss:
            return batch
        return batch.with_fields(is_scored_B=rows_to_score(batch, self._config.algo))

    def compute_advantages(self, rollout_batch: RolloutBatch, batch: TrainBatch) -> TrainInputs:
        """Shape the rewards of a scored batch; add importance weights, advantages and KL weights.

        Changes no state, so it may be interrupted and repeated.

        Args:
            rollout_batch: The rollouts of the step.
            batch: Packed from `rollout_batch.trees`, with all log-probs and rewards.
        """
        algo, controllers = self._config.algo, self.controllers
        if self._config.model.zero_mismatch:
            check_zero_mismatch(batch)
        kl_coef = controllers.kl_coef(algo)
        ares_step, kl_weight_BT = None, adaptive_kl_weights(controllers, algo, batch)
        if algo.ares.mode is not AresMode.off:
            ares_step = start_ares_step(
                collect_entropy_stats(
                    rollout_batch.finished_trees,
                    self._components.trigger_ids,
                    window=algo.ares.window_tokens,
                ),
                controllers.ares,
                build_rules(algo, kl_coef),
                filtered=self._config.rollout.filter_metric is not FilterMetric.none,
            )
            if algo.ares.shape_rewards:
                batch = add_entropy_rewards(batch, rollout_batch.trees, ares_step)
            kl_weight_BT = token_kl_weights(batch, rollout_batch.trees, ares_step)
        batch, correction_metrics = add_importance_weights(batch, algo)
        is_in_loss = algo.kl_placement is KlPlacement.loss
        batch, advantage_metrics = add_advantages(
            batch,
            algo,
            kl_coef=kl_coef,
            cot_marker_ids=self._components.cot_marker_ids,
            kl_weight_BT=None if is_in_loss else kl_weight_BT,
        )
        return TrainInputs(
            batch=batch,
            kl_weight_BT=kl_weight_BT if is_in_loss else None,
            has_signal_B=(
                None if self._config.model.has_router_loss else rows_with_signal(batch, algo)
            ),
            ares_step=ares_step,
            metrics=correction_metrics | advantage_metrics,
        )

    def observe(
        self, rollout_batch: RolloutBatch, train_inputs: TrainInputs, stats: UpdateStats
    ) -> dict[str, float]:
        """Advance the controllers and the prompt source after an update; return metrics.

        Prompts are excluded at the end, because the next weight sync may start rollouts.
        """
        algo = self._config.algo
        metrics = {"data/epoch": self._components.prompt_source.num_epochs}
        if algo.ares.skip_mastered:
            metrics["data/num_excluded"] = float(self._components.prompt_source.num_excluded)
        is_updated = stats.num_skipped_steps < self._config.optim.num_minibatches
        if self.controllers.adaptive_kl is not None and is_updated:
            observed = (
                train_inputs.metrics["advantage/ref_kl"]
                if algo.kl_placement is KlPlacement.reward
                else stats.metrics["ref_kl"]
            )
            num_samples = count_trained_trajectories(train_inputs.batch)
            self.controllers = update_kl(self.controllers, observed, num_samples)
            metrics["kl/coef"] = self.controllers.kl_coef(algo)
        if (ares_step := train_inputs.ares_step) is not None:
            kl_B = mean_ref_kl(
                train_inputs.batch, rollout_batch.trees, ares_step, str(algo.kl_estimator)
            )
            self.controllers = update_controllers(self.controllers, ares_step, kl_B)
            metrics |= ares_metrics(self.controllers, ares_step, kl_B)
        self._components.prompt_source.record_accuracies(prompt_accuracies(rollout_batch))
        self._exclude_mastered_prompts()
        return metrics

    def _exclude_mastered_prompts(self) -> None:
        if self._config.algo.ares.skip_mastered:
            mastery, seed = self.controllers.mastery, self._config.seed
            self._components.prompt_source.exclude(
                lambda epoch: mastery.skipped_prompts(seed=seed, epoch=epoch)
            )


def bootstrap_controllers(
    components: Components, config: TrainConfig, logger: RunLogger
) -> Controllers:
    """Return the initial controllers, after the bootstrap pass if `algo.ares.bootstrap` is set."""
    controllers = initial_controllers(config.algo)
    if not config.algo.ares.bootstrap:
        return controllers
    prompts = components.prompt_source.prompts
    with logger.stage("bootstrap", ceil(len(prompts) / config.data.prompts_per_step)):
        controllers = run_bootstrap(
            components, config, prompts, controllers, logger.log_bootstrap_progress
        )
    logger.print_line(format_bootstrap_summary(controllers))
    return controllers


def prompt_accuracies(rollout_batch: RolloutBatch) -> dict[str, float]:
    """Return the fraction of correct trajectories by prompt.

    Prompts without a valid trajectory are left out.
    """
    correct_by_prompt: dict[str, list[bool]] = {}
    for tree in rollout_batch.finished_trees:
        is_correct = [score.correct for score in valid_scores(tree.trajectories)]
        correct_by_prompt.setdefault(tree.prompt.prompt_id, []).extend(is_correct)
    return {
        name: sum(is_correct) / len(is_correct)
        for name, is_correct in correct_by_prompt.items()
        if is_correct
    }

"""Build the inputs of an update, and advance the controllers after it.

Before the update, ARES shapes the rewards, importance weights and advantages are filled in, and
the KL term gets its weights. After it, the controllers move by what the training rollouts showed
and by the measured KL. Nothing here waits for a remote call. The formulas are in `algo`, the steps
of each method in `ares`, `advantages` and `controllers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import AresMode, FilterMetric, KlPlacement
from mega_agentrl.train.advantages import add_advantages, add_importance_weights
from mega_agentrl.train.ares.bootstrap import format_bootstrap_summary, run_bootstrap
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats, is_valid_trajectory
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

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups.rollout_batch import RolloutBatch
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.run_logger import RunLogger
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.components import Components


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """A batch that is ready for the update."""

    batch: TrainBatch
    kl_weight_BT: torch.Tensor | None
    """[B, T] float32 weight of each token's KL; None uses `algo.kl_coef` throughout."""
    ares_step: AresStep | None
    """Statistics and rewards of ARES; None without it."""
    metrics: dict[str, float] = field(default_factory=dict)


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


def exclude_mastered_prompts(
    components: Components, config: TrainConfig, controllers: Controllers
) -> None:
    """Exclude mastered prompts from sampling if `algo.ares.skip_mastered` is set."""
    if config.algo.ares.skip_mastered:
        mastery = controllers.mastery
        components.prompt_source.exclude(
            lambda epoch: mastery.skipped_prompts(seed=config.seed, epoch=epoch)
        )


def record_prompt_accuracies(components: Components, rollout_batch: RolloutBatch) -> None:
    """Report the accuracy on each prompt of a step to the sampler.

    Prompts without a valid trajectory are not reported.
    """
    correct_by_prompt: dict[str, list[bool]] = {}
    for tree in rollout_batch.finished_trees:
        is_correct = [
            one.score.correct for one in tree.trajectories if is_valid_trajectory(one) and one.score
        ]
        correct_by_prompt.setdefault(tree.prompt.prompt_id, []).extend(is_correct)
    components.prompt_source.record_accuracies(
        {
            name: sum(is_correct) / len(is_correct)
            for name, is_correct in correct_by_prompt.items()
            if is_correct
        }
    )


def prepare_train_batch(
    components: Components,
    config: TrainConfig,
    controllers: Controllers,
    rollout_batch: RolloutBatch,
    batch: TrainBatch,
) -> TrainInputs:
    """Shape the rewards of a scored batch and add importance weights, advantages and KL weights.

    Args:
        components: The parts of the run.
        config: Settings of the run.
        controllers: State before the step.
        rollout_batch: The rollouts of the step.
        batch: Packed from `rollout_batch.trees`, with all log-probs and rewards.
    """
    algo, kl_coef = config.algo, controllers.kl_coef(config.algo)
    ares_step, kl_weight_BT = None, adaptive_kl_weights(controllers, algo, batch)
    if algo.ares.mode is not AresMode.off:
        filtered = config.rollout.filter_metric is not FilterMetric.none
        entropy_stats, rules = (
            collect_entropy_stats(rollout_batch.finished_trees, components.trigger_ids),
            build_rules(algo, kl_coef),
        )
        ares_step = start_ares_step(entropy_stats, controllers.ares, rules, filtered=filtered)
        batch = add_entropy_rewards(batch, rollout_batch.trees, ares_step)
        kl_weight_BT = token_kl_weights(batch, rollout_batch.trees, ares_step)
    batch, correction_metrics = add_importance_weights(batch, algo)
    batch, advantage_metrics = add_advantages(
        batch, algo, kl_coef=kl_coef, cot_marker_ids=components.cot_marker_ids
    )
    return TrainInputs(
        batch=batch,
        kl_weight_BT=kl_weight_BT,
        ares_step=ares_step,
        metrics=correction_metrics | advantage_metrics,
    )


def advance_controllers(
    components: Components,
    config: TrainConfig,
    controllers: Controllers,
    train_inputs: TrainInputs,
    rollout_batch: RolloutBatch,
    stats: UpdateStats,
) -> tuple[Controllers, dict[str, float]]:
    """Return the controllers after the update, and metrics about them."""
    algo, metrics = config.algo, dict[str, float]()
    if algo.ares.skip_mastered:
        metrics["data/num_excluded"] = float(components.prompt_source.num_excluded)
    is_kl_in_reward = algo.kl_placement is KlPlacement.reward
    num_steps = config.optim.num_minibatches - stats.num_skipped_steps
    if controllers.adaptive_kl is not None and num_steps:
        observed = (
            train_inputs.metrics["advantage/ref_kl"] if is_kl_in_reward else stats.metrics["ref_kl"]
        )
        controllers = update_kl(controllers, observed, num_steps)
        metrics["kl/coef"] = controllers.kl_coef(algo)
    if train_inputs.ares_step is not None:
        kl_B = mean_ref_kl(
            train_inputs.batch, rollout_batch.trees, train_inputs.ares_step, str(algo.kl_estimator)
        )
        controllers = update_controllers(controllers, train_inputs.ares_step, kl_B)
        metrics |= ares_metrics(controllers, train_inputs.ares_step, kl_B)
    return controllers, metrics

"""The training run: warm start, evaluation, RL steps with evaluations in between, evaluation.

With `rollout.max_staleness=0` every trajectory of a step is sampled with the weights that the step
updates, except for the beginnings that `rollout.partial_rollout` carries over. Otherwise
trajectories come from weights that are a few updates older, collected while earlier steps train
(`scheduler`). The parts of a step are in `rollout_collection`, `rewards`, `train_inputs` and
`critic_steps`, evaluation is in `evaluate`, the warm start in `warm_start`, metrics and other
output in `run_logger`. `signals`, `checkpoints` and `resume` interrupt, save and continue a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.train.checkpoints import CheckpointManager
from mega_agentrl.train.critic_steps import add_values, update_models
from mega_agentrl.train.evaluate import ValidationResult, evaluate_validation_set
from mega_agentrl.train.output.profiling import start_profile, stop_profile
from mega_agentrl.train.resume.restore import restore
from mega_agentrl.train.rewards import resolve_rewards
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.scheduler import SyncRolloutScheduler, open_rollout_scheduler
from mega_agentrl.train.signals import SignalHandler
from mega_agentrl.train.train_inputs import (
    TrainInputs,
    advance_controllers,
    bootstrap_controllers,
    exclude_mastered_prompts,
    prepare_train_batch,
    record_prompt_accuracies,
)
from mega_agentrl.train.warm_start import run_warm_start

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups.collector import RolloutCollector
    from mega_agentrl.rollout.groups.rollout_batch import RolloutBatch
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.scheduler import RolloutScheduler
    from mega_agentrl.types.components import Components


def train(
    components: Components, config: TrainConfig, signal_handler: SignalHandler | None = None
) -> float:
    """Run all of the training, or what is left of it, and return the final validation reward.

    Raises:
        RunInterrupted: The process received a signal; the run has been saved.
    """
    signal_handler = signal_handler or SignalHandler()
    components = replace(
        components, run_coroutine=signal_handler.make_cancellable(components.run_coroutine)
    )
    state = restore(components, config)
    with (
        RunLogger(Path(config.run_dir), config, monitors=components.monitors) as logger,
        CheckpointManager(components, config, logger, signal_handler, state) as checkpoints,
    ):
        logger.log_startup(components.startup_s)
        if config.is_eval_only:
            logger.print_line(
                "validation only: no step is asked for, nothing is trained or exported"
            )
        if not checkpoints.warm_start_done:
            initialize_policy(components, config, logger, checkpoints)
            checkpoints.record_warm_start_done()
        if (before := checkpoints.validation_before) is None:
            with logger.stage("held out before", 1):
                before = checkpoints.record_validation_before(
                    _run_validation(components, config, logger, "before")
                )
        after = (
            run_rl_steps(components, config, logger, checkpoints) if config.total_steps else before
        )
        if not config.is_eval_only:
            components.policy.export_hf(logger.run_dir / "model")
        logger.finish(before, after)
    return after.sampled.reward


def initialize_policy(
    components: Components, config: TrainConfig, logger: RunLogger, checkpoints: CheckpointManager
) -> None:
    """Run the warm start if there is one, and return with the engines serving the weights."""
    if components.open_sft_stream is not None:
        run_warm_start(components, config, logger, checkpoints.warm_start_checkpointing())
    else:
        components.policy.sync_weights(components.generator, version=1)


def run_rl_steps(
    components: Components, config: TrainConfig, logger: RunLogger, checkpoints: CheckpointManager
) -> ValidationResult:
    """Run the remaining RL steps and the final validation."""
    controllers = checkpoints.controllers or bootstrap_controllers(components, config, logger)
    with (
        logger.stage("RL", config.total_steps, num_done=checkpoints.step),
        open_rollout_scheduler(
            components, config, checkpoints, checkpoints.signal_handler
        ) as scheduler,
    ):
        for step in range(checkpoints.step + 1, config.total_steps + 1):
            if checkpoints.is_validation_due:
                _run_validation(components, config, logger, "during")
                checkpoints.record_validation()
            prepared = prepare_update(components, config, logger, scheduler, controllers, step)
            with checkpoints.signal_handler.defer_signals():
                controllers = apply_update(
                    components, config, logger, scheduler, controllers, step, prepared
                )
                checkpoints.record_step(step, controllers)
    with logger.stage("held out after", 1):
        return _run_validation(components, config, logger, "after")


def _run_validation(
    components: Components, config: TrainConfig, logger: RunLogger, when: str
) -> ValidationResult:
    with logger.phase_timer.phase("evaluate"):
        held_out = evaluate_validation_set(
            components, config, partial(logger.save_validation_rollouts, when)
        )
    return logger.log_validation(when, held_out)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A batch that is ready for the update, and the rollouts it was made from."""

    rollout_batch: RolloutBatch
    train_inputs: TrainInputs


def train_step(
    components: Components,
    config: TrainConfig,
    logger: RunLogger,
    collector: RolloutCollector,
    controllers: Controllers,
    step: int,
) -> Controllers:
    """Run one synchronous RL step and return the controllers for the next one."""
    scheduler = SyncRolloutScheduler(components, collector)
    prepared = prepare_update(components, config, logger, scheduler, controllers, step)
    return apply_update(components, config, logger, scheduler, controllers, step, prepared)


def prepare_update(
    components: Components,
    config: TrainConfig,
    logger: RunLogger,
    scheduler: RolloutScheduler,
    controllers: Controllers,
    step: int,
) -> PreparedStep:
    """Collect and score rollouts and compute everything that the update needs.

    Changes no state except which prompts are acknowledged, so it may be interrupted and repeated.
    """
    phase = logger.phase_timer.phase
    exclude_mastered_prompts(components, config, controllers)
    with phase("rollout"):
        rollout_batch = scheduler.collect(step)
        batch = pack_trees(rollout_batch.trees)
    start_profile(components, config, step)
    with phase("logprob"):
        batch = add_values(components, components.policy.compute_log_probs(batch))
    with phase("reward"):
        rollout_batch, batch = resolve_rewards(components, rollout_batch, batch)
    with phase("advantage"):
        train_inputs = prepare_train_batch(components, config, controllers, rollout_batch, batch)
    return PreparedStep(rollout_batch, train_inputs)


def apply_update(
    components: Components,
    config: TrainConfig,
    logger: RunLogger,
    scheduler: RolloutScheduler,
    controllers: Controllers,
    step: int,
    prepared: PreparedStep,
) -> Controllers:
    """Update the models, advance the controllers, sync the weights and log the step.

    The run must not be saved while this is under way.
    """
    phase, train_inputs, rollout_batch = (
        logger.phase_timer.phase,
        prepared.train_inputs,
        prepared.rollout_batch,
    )
    with phase("update"):
        stats, critic_metrics = update_models(components, config, train_inputs, step)
    stop_profile(components, config, step)
    with phase("rollout"):
        scheduler.wait_before_weight_sync()
    with phase("advantage"):
        controllers, controller_metrics = advance_controllers(
            components, config, controllers, train_inputs, rollout_batch, stats
        )
        record_prompt_accuracies(components, rollout_batch)
        # Once more, because the sync may start the rollouts of a coming step.
        exclude_mastered_prompts(components, config, controllers)
    with phase("weight_sync"):
        sync_metrics = components.policy.sync_weights(
            components.generator, components.generator.version + 1
        )
    scheduler.on_weights_synced(step)
    metrics = {**train_inputs.metrics, **controller_metrics, **critic_metrics}
    logger.log_step(step, rollout_batch, train_inputs.batch, stats, metrics, sync_metrics)
    return controllers

"""The training run: warm start, evaluation, RL steps with evaluations in between, evaluation.

`Trainer.step` is the algorithm; `run_rl_steps` evaluates and saves between steps.

With `rollout.max_staleness=0` every token of a step is sampled with the weights that the step
updates, except for the unfinished trajectories that `rollout.partial_rollout` carries over.
Otherwise trajectories are collected while earlier steps train, with weights that are a few updates
older (`scheduler`).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.rollout.metrics.failures import count_failures
from mega_agentrl.train.algorithm import Algorithm, bootstrap_controllers
from mega_agentrl.train.checkpoints import CheckpointManager
from mega_agentrl.train.evaluate import ValidationResult, evaluate_validation_set
from mega_agentrl.train.failure_guard import FailureGuard
from mega_agentrl.train.model_updater import ModelUpdater, Profiler
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.restore import restore
from mega_agentrl.train.rewards import RewardResolver
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.scheduler import RolloutScheduler, open_rollout_scheduler
from mega_agentrl.train.signals import SignalHandler
from mega_agentrl.train.warm_start import run_warm_start
from mega_agentrl.types.errors import AuxiliaryModelLostError, RankLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.components import Components
    from mega_agentrl.types.protocols import ImageLoader
    from mega_agentrl.types.records import RolloutTree

MAX_FAILURES_WITHOUT_PROGRESS = 3

_P = ParamSpec("_P")
_ResultT = TypeVar("_ResultT")

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The components of an RL step, and their order."""

    rollouts: RolloutScheduler
    """Collects the groups of each step, synchronously or ahead of training."""
    policy: ModelUpdater
    """Scores and updates the policy and the critic, and sends the weights to the engines."""
    rewards: RewardResolver
    """Waits for rewards that are computed elsewhere, and asks the reward model for its scores."""
    algorithm: Algorithm
    """Computes advantages, and keeps the state that lasts across steps."""
    profiler: Profiler
    """Profiles the steps of `report.profile_steps`."""
    logger: RunLogger
    """Writes and shows the metrics of the step."""
    failure_guard: FailureGuard
    """Stops the run if most trajectories fail."""
    signal_handler: SignalHandler
    """Interrupts a step only inside `_interruptible`, if the caller defers signals."""
    commit_checkpoint: Callable[[], None]
    """Commits a checkpoint that the ranks have written while the rollouts ran."""
    images: ImageLoader | None = None
    """Loads the images of the trees to train on; None for a model of text."""

    def step(self, step: int) -> None:
        """Run one RL step; until its update, nothing changes but the position in the prompts."""
        rollouts = self._interruptible("rollout", self.rollouts.collect, step)
        self.profiler.start(step)
        batch = self._interruptible("rollout", self._pack, rollouts.trees)
        self.commit_checkpoint()
        if has_rewards := self.rewards.are_known(rollouts):
            batch = self._interruptible("reward", self.rewards.resolve, rollouts, batch)
            batch = self.algorithm.select_rows_to_score(batch)
        batch = self._interruptible("logprob", self.policy.compute_log_probs, batch)
        if not has_rewards:
            batch = self._interruptible("reward", self.rewards.resolve, rollouts, batch)
        self.failure_guard.check_step(step, count_failures(rollouts.finished_trees))
        compute_advantages = self.algorithm.compute_advantages
        inputs = self._interruptible("advantage", compute_advantages, rollouts, batch)
        stats, critic_metrics = self._timed("update", self.policy.update, inputs, step)
        inputs = inputs.with_scores(stats.scores)
        self.profiler.stop(step)
        self._timed("rollout", self.rollouts.wait_before_weight_sync)
        metrics = self._timed("advantage", self.algorithm.observe, rollouts, inputs, stats)
        sync_metrics = self._timed("weight_sync", self.policy.sync_weights)
        self.rollouts.on_weights_synced(step)
        metrics = inputs.metrics | metrics | critic_metrics
        self.logger.log_step(step, rollouts, inputs.batch, stats, metrics, sync_metrics)

    def _pack(self, trees: Sequence[RolloutTree]) -> TrainBatch:
        return pack_trees(trees if self.images is None else self.images.load_trees(trees))

    def _timed(
        self, phase: str, call: Callable[_P, _ResultT], *args: _P.args, **kwargs: _P.kwargs
    ) -> _ResultT:
        """Return the call's result; its duration counts under `time/<phase>_s`."""
        with self.logger.phase_timer.phase(phase):
            return call(*args, **kwargs)

    def _interruptible(
        self, phase: str, call: Callable[_P, _ResultT], *args: _P.args, **kwargs: _P.kwargs
    ) -> _ResultT:
        """Run the call as `_timed` does; signals may interrupt it.

        Only for calls that change nothing but the position in the prompts: a checkpoint has the
        position at the last boundary between steps, so a resumed run repeats them.
        """
        with self.signal_handler.allow_signals():
            return self._timed(phase, call, *args, **kwargs)


@contextmanager
def open_trainer(
    components: Components,
    config: TrainConfig,
    logger: RunLogger,
    controllers: Controllers,
    checkpoints: CheckpointManager | None = None,
) -> Iterator[Trainer]:
    """Yield the trainer of the remaining steps; cancel unused rollouts on exit.

    Args:
        components: The components of the run.
        config: Settings of the run.
        logger: Logs the steps; its `phase_timer` times their phases.
        controllers: State of the algorithm before the first of these steps.
        checkpoints: Has the finished steps, their trees, and the signal handler whose
            `defer_signals` the caller runs each step in, so that signals interrupt it only before
            its update. None for steps that are not saved.
    """
    signal_handler = SignalHandler() if checkpoints is None else checkpoints.signal_handler
    algorithm = Algorithm(components, config, controllers)
    with open_rollout_scheduler(
        components,
        config,
        signal_handler,
        num_done=0 if checkpoints is None else checkpoints.step,
        tree_store=None if checkpoints is None else checkpoints.tree_store,
    ) as rollouts:
        yield Trainer(
            rollouts=rollouts,
            policy=ModelUpdater(components, config),
            rewards=RewardResolver(components),
            algorithm=algorithm,
            profiler=Profiler(components, config),
            failure_guard=FailureGuard(config.rollout.max_failed_fraction),
            logger=logger,
            signal_handler=signal_handler,
            images=components.images,
            commit_checkpoint=(
                (lambda: None) if checkpoints is None else checkpoints.commit_if_written
            ),
        )


def train(
    components: Components, config: TrainConfig, signal_handler: SignalHandler | None = None
) -> float:
    """Run the training, or the rest of it, and return the final validation reward.

    The reward is NaN without `data.validation`.

    Raises:
        RunStoppedError: Most trajectories fail, or a tool or a reward function does.
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
                "validation only: no training steps are configured, nothing is trained or exported"
            )
        if not checkpoints.warm_start_done:
            initialize_policy(components, config, logger, checkpoints)
            checkpoints.record_warm_start_done()
        before = checkpoints.validation_before
        if before is None and is_evaluated_before(components, config):
            with logger.stage("held out before", 1):
                before = checkpoints.record_validation_before(
                    _run_validation(components, config, logger, "before")
                )
        after = (
            run_rl_steps(components, config, logger, checkpoints) if config.total_steps else before
        )
        if not config.is_eval_only:
            components.policy.export_hf(logger.run_dir / "model")
        checkpoints.finish()
        logger.finish(before, after)
    return math.nan if after is None else after.sampled.reward


def is_evaluated_before(components: Components, config: TrainConfig) -> bool:
    """Return whether there is an evaluation before RL; without RL it is the only one."""
    is_configured = config.evaluate.before_training or not config.total_steps
    return bool(components.validation_prompts) and is_configured


def initialize_policy(
    components: Components, config: TrainConfig, logger: RunLogger, checkpoints: CheckpointManager
) -> None:
    """Run the warm start if there is one, and return with the engines serving the weights."""
    if components.make_demonstration_batches is not None:
        run_warm_start(components, config, logger, checkpoints.warm_start_checkpointing())
    else:
        components.policy.sync_weights(components.generator, version=1)


def run_rl_steps(
    components: Components, config: TrainConfig, logger: RunLogger, checkpoints: CheckpointManager
) -> ValidationResult | None:
    """Run the remaining RL steps and the final validation, None without `data.validation`.

    A signal interrupts a step only before its update. After that it waits until the boundary is
    recorded, because the models then belong to neither of the two boundaries.
    """
    controllers = checkpoints.controllers or bootstrap_controllers(components, config, logger)
    with (
        logger.stage("RL", config.total_steps, num_done=checkpoints.step),
        open_trainer(components, config, logger, controllers, checkpoints) as trainer,
    ):
        for step in range(checkpoints.step + 1, config.total_steps + 1):
            if components.validation_prompts and checkpoints.is_validation_due:
                _run_validation(components, config, logger, "during")
                checkpoints.record_validation()
            with checkpoints.signal_handler.defer_signals():
                trainer.step(step)
                checkpoints.record_step(step, trainer.algorithm.controllers)
    if not components.validation_prompts:
        return None
    with logger.stage("held out after", 1):
        return _run_validation(components, config, logger, "after")


def _run_validation(
    components: Components, config: TrainConfig, logger: RunLogger, when: str
) -> ValidationResult:
    with logger.phase_timer.phase("evaluate"):
        held_out = evaluate_validation_set(
            components,
            config,
            partial(logger.save_validation_rollouts, when),
            logger.metric_names,
        )
    result = logger.log_validation(when, held_out)
    failure_guard = FailureGuard(config.rollout.max_failed_fraction)
    failure_guard.check_evaluation(when, result.sampled.failures)
    return result


def train_with_restarts(
    components: Components, config: TrainConfig, signal_handler: SignalHandler
) -> float:
    """Call `train`, and restart lost models in place from the last checkpoint.

    The engines, the sandboxes and Ray keep running. Everything else is what a new start of the same
    command would do (`restore`), so both give the same result.

    Raises:
        RankLostError: A model was lost `MAX_FAILURES_WITHOUT_PROGRESS` times between two
            checkpoints, restarts included, and the policy was the last one.
        AuxiliaryModelLostError: The same, and the critic or the reward model was the last one.
    """
    sampler_state = components.prompt_source.state_dict()
    newest_checkpoint, num_failures = _newest_checkpoint(config), 0
    while True:
        try:
            if num_failures:
                signal_handler.raise_if_signalled()
                components = _restart_models(components, sampler_state, newest_checkpoint)
            return train(components, config, signal_handler)
        except (RankLostError, AuxiliaryModelLostError) as error:
            previous_checkpoint, newest_checkpoint = newest_checkpoint, _newest_checkpoint(config)
            num_failures = num_failures + 1 if previous_checkpoint == newest_checkpoint else 1
            _logger.warning("a model is lost (%d): %s", num_failures, error)
            if num_failures >= MAX_FAILURES_WITHOUT_PROGRESS:
                raise
            where = "the beginning" if newest_checkpoint is None else newest_checkpoint
            is_policy = isinstance(error, RankLostError)
            text = "the policy is restarted from" if is_policy else "the models are restarted from"
            print(f"{text} {where}: {error}", file=sys.stderr)


def _restart_models(
    components: Components, sampler_state: Mapping[str, Any], checkpoint: Path | None
) -> Components:
    """Restart the models and reset the prompts; return the components for another `train`."""
    start_s = time.perf_counter()
    components.policy.restart()
    for model in (components.critic, components.reward_model):
        if model is not None:
            model.restart_if_lost()
    components.prompt_source.exclude(None)
    components.prompt_source.load_state_dict(sampler_state)
    if checkpoint is None:
        components.policy.sync_weights(components.generator, version=0)
    return replace(components, startup_s=time.perf_counter() - start_s)


def _newest_checkpoint(config: TrainConfig) -> Path | None:
    return next(iter(run_state.valid_checkpoints(Path(config.run_dir))), None)

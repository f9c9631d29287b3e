"""One run of the comparison, from the shared warm start until its budget is spent.

    out/<task>/warm/        checkpoint that all runs of the task start from, and its evaluations
    out/<task>/runs/<run>/  settings.json, metrics.jsonl, checkpoints/, progress.json, at the end
                            result.json
    out/<task>/tuning/<run>/  the same, evaluated on the development questions

A critic starts from `model.path` in each run, as in training.

A killed run continues from its newest checkpoint; a run with a result is not repeated. The settings
are stored in each folder, and reusing a folder with other settings is an error. `progress.json` has
the cost and the evaluations until each checkpoint, and is written before it.

The budget is a number of tokens that the policy generates in training, or of steps. Held-out
evaluations take place at equal fractions of the budget, on the same questions with the same seeds
in all runs, and do not count towards it. A run ends with the step that exhausts the budget, or with
one that the algorithm cannot make, such as one whose filter finds no group to train on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.algorithms import EvalCostPoint
from mega_agentrl.runtime.inputs import load_cot_markers
from mega_agentrl.train.controllers import Controllers, initial_controllers
from mega_agentrl.train.evaluate import evaluate_validation_set
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.trainer import open_trainer
from mega_agentrl.train.warm_start import run_warm_start
from mega_agentrl.types.atomic_file import atomic_write
from mega_agentrl.types.serialization import from_builtins, to_builtins
from tools.compare.budget import Budget, RolloutCost
from tools.compare.plan import differing_keys

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.components import Components

SETTINGS, RESULT, PROGRESS = "settings.json", "result.json", "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSetup:
    """Components and starting point that all runs share."""

    components: Components
    """Policy, engine, tools and data."""
    base_config: TrainConfig
    """The configuration that the components were built from."""
    warm_start_folder: Path
    """The checkpoint that all runs start from."""
    initial_evaluation: EvalCostPoint
    """The evaluation of that checkpoint on the components' validation questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Result of a run."""

    evaluations: tuple[EvalCostPoint, ...]
    """At equal fractions of the budget; the first before training."""
    stop_reason: str = ""
    """Why the run ended before its budget was spent; later evaluations repeat that of its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The cost and the evaluations of a run after some steps."""

    step: int
    """Finished steps."""
    cost: RolloutCost
    """Cost of the steps."""
    evaluations: tuple[EvalCostPoint, ...]
    """Evaluations so far, the first before training."""

    @classmethod
    def read(cls, folder: Path, step: int) -> Progress:
        """Read what `write` stored for the step."""
        by_step = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        return from_builtins(cls, by_step[str(step)], f"{folder / PROGRESS}, step {step}")

    def write(self, folder: Path) -> None:
        """Add this progress to that of earlier steps in `progress.json`."""
        path = folder / PROGRESS
        by_step = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        write_json(path, by_step | {str(self.step): self})


class CostCountingLogger(RunLogger):
    """A run logger that sums up the cost of its steps."""

    def __init__(self, run_dir: Path, config: TrainConfig, spent: RolloutCost) -> None:
        super().__init__(run_dir, config)
        self.rollout_cost = spent

    def log_step(self, step: int, rollout_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Log the step and add its cost."""
        self.rollout_cost += RolloutCost.of_trees(rollout_batch.finished_trees)
        super().log_step(step, rollout_batch, *args, **kwargs)


def make_warm_start(
    parts: Components, base: TrainConfig, settings: dict[str, Any], folder: Path
) -> Path:
    """Return the checkpoint that all runs start from, creating it if needed."""
    claim_folder(folder, settings)
    if (checkpoint := _newest_checkpoint(folder)) is not None:
        return checkpoint
    # A warm start that was killed is repeated from its beginning.
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    with RunLogger(folder, base) as logger:
        if parts.make_demonstration_batches is not None:
            run_warm_start(parts, base, logger)
    return run_state.save_checkpoint(parts.policy, folder, RunState(step=0, sampler_state={}))


def evaluate_warm(parts: Components, base: TrainConfig, warm: Path, path: Path) -> EvalCostPoint:
    """Return the evaluation of the warm start, which is made once and stored in the file."""
    if not path.is_file():
        parts.policy.load_checkpoint(warm)
        _serve(parts)
        write_json(path, measure_held_out(parts, base, RolloutCost()))
    return from_builtins(EvalCostPoint, json.loads(path.read_text(encoding="utf-8")), str(path))


def run_once(
    setup: ComparisonSetup,
    config: TrainConfig,
    settings: dict[str, Any],
    budget: Budget,
    save_every: int,
) -> FinishedRun:
    """Start, continue or read one run."""
    folder = Path(config.run_dir)
    if (finished := read_result(folder, settings)) is not None:
        return finished
    prompts = PromptSampler(setup.components.prompt_source.prompts, config.seed)
    progress, controllers = _restore(setup, config, prompts)
    parts = replace(
        setup.components,
        run_dir=folder,
        prompt_source=prompts,
        # The components were built for another algorithm.
        cot_marker_ids=load_cot_markers(config, setup.components.codec),
    )
    finished = _train(parts, setup.base_config, config, progress, controllers, budget, save_every)
    write_json(folder / RESULT, finished)
    return finished


def read_result(folder: Path, settings: dict[str, Any]) -> FinishedRun | None:
    """Return the result of a finished run, or None if it is not finished.

    Raises:
        ValueError: the folder belongs to a run with other settings.
    """
    claim_folder(folder, settings)
    path = folder / RESULT
    if not path.is_file():
        return None
    return from_builtins(FinishedRun, json.loads(path.read_text(encoding="utf-8")), str(path))


def _restore(
    setup: ComparisonSetup, config: TrainConfig, prompts: PromptSampler
) -> tuple[Progress, Controllers]:
    """Restore the warm start, and then the run's newest checkpoint if it has one."""
    policy, critic = setup.components.policy, setup.components.critic
    folder = Path(config.run_dir)
    policy.load_checkpoint(setup.warm_start_folder)
    if critic is not None:
        critic.reset()
    # The reference weights are those of the warm start, also in a continued run.
    policy.set_objective(config.algo, config.rollout.temperature)
    controllers = initial_controllers(config.algo)
    progress = Progress(step=0, cost=RolloutCost(), evaluations=(setup.initial_evaluation,))
    if (checkpoint := _newest_checkpoint(folder)) is not None:
        state = run_state.load_checkpoint(policy, checkpoint, critic)
        progress = Progress.read(folder, state.step)
        controllers = state.controllers or controllers
        prompts.load_state_dict(state.sampler_state)
    run_state.truncate_metrics(folder, progress.step)
    _serve(setup.components)
    return progress, controllers


def _train(
    parts: Components,
    base: TrainConfig,
    config: TrainConfig,
    progress: Progress,
    controllers: Controllers,
    budget: Budget,
    save_every: int,
) -> FinishedRun:
    folder = Path(config.run_dir)
    with (
        CostCountingLogger(folder, config, progress.cost) as logger,
        logger.stage(f"{folder.name}, {budget}", budget.num_steps or config.total_steps),
        open_trainer(parts, config, logger, controllers) as trainer,
    ):
        if progress.step:
            logger.print_line(f"{folder.name}: continuing after step {progress.step}")
        while budget.fraction_spent(progress.step, progress.cost) < 1:
            step, evaluations = progress.step + 1, progress.evaluations
            try:
                trainer.step(step)
                logger.finish_step()
            except ValueError as error:  # such as no group that the filter accepts
                logger.print_line(f"{folder.name} ends in step {step}: {error}")
                return _stopped_run(parts, base, logger.rollout_cost, evaluations, budget, error)
            due = budget.num_evaluations_due(step, logger.rollout_cost)
            if due >= len(evaluations):
                evaluation = measure_held_out(parts, base, logger.rollout_cost)
                # Several evaluations may be due after one step.
                evaluations += (evaluation,) * (due + 1 - len(evaluations))
            progress = Progress(step=step, cost=logger.rollout_cost, evaluations=evaluations)
            if step % save_every == 0 or budget.fraction_spent(step, progress.cost) >= 1:
                progress.write(folder)
                state = RunState(
                    step=step,
                    sampler_state=parts.prompt_source.state_dict(),
                    controllers=trainer.algorithm.controllers,
                )
                run_state.save_checkpoint(parts.policy, folder, state, critic=parts.critic)
    return FinishedRun(evaluations=progress.evaluations)


def _stopped_run(
    parts: Components,
    base: TrainConfig,
    spent: RolloutCost,
    evaluations: tuple[EvalCostPoint, ...],
    budget: Budget,
    error: ValueError,
) -> FinishedRun:
    """Return the result of a run that cannot go on, with its last weights at all later points."""
    num_missing = 1 + budget.num_evaluations - len(evaluations)
    last = measure_held_out(parts, base, spent)
    return FinishedRun(evaluations=evaluations + (last,) * num_missing, stop_reason=str(error))


def measure_held_out(parts: Components, base: TrainConfig, spent: RolloutCost) -> EvalCostPoint:
    """Evaluate the served weights on the held-out questions, with the seeds of `base`."""
    sampled = evaluate_validation_set(parts, base).sampled
    return EvalCostPoint(
        num_tokens=spent.num_tokens,
        num_tool_calls=spent.num_tool_calls,
        reward=sampled.reward,
        success=sampled.success,
    )


def claim_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Store the settings in the folder; raise `ValueError` if it has other settings."""
    path = folder / SETTINGS
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
        return
    if keys := differing_keys(json.loads(path.read_text(encoding="utf-8")), settings):
        raise InputError(
            str(folder),
            f"a run with other values of {', '.join(keys)}",
            "the current ones",
            "other arguments than the first time. Choose another --out, or remove the folder",
        )


def write_json(path: Path, value: Any) -> None:
    """Write records or plain values as JSON, atomically."""
    atomic_write(path, json.dumps(to_builtins(value), indent=1) + "\n")


def _newest_checkpoint(folder: Path) -> Path | None:
    return next(iter(run_state.valid_checkpoints(folder)), None)


def _serve(parts: Components) -> None:
    parts.policy.sync_weights(parts.generator, parts.generator.version + 1)

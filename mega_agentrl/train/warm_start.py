"""Supervised warm start: imitate demonstrations until the policy has some success, then stop.

It ends when success on the development questions reaches `sft.target_success_rate`, and at least
`MIN_SOURCE_SUCCESS` on every data source, or after `sft.max_steps`. Success is measured with the
current weights in the rollout engines, sampled as in RL. An interrupted warm start continues after
its last step (`WarmStartProgress`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.train.evaluate import EvalResult, evaluate, first_questions

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.policy import SftConfig
    from mega_agentrl.train.run_logger import RunLogger
    from mega_agentrl.types.components import Components

MIN_SOURCE_SUCCESS = 0.05
"""Success that every data source must reach."""
EVAL_EVERY_STEPS = 50
"""Steps between two evaluations, each of which costs as much as a few steps."""


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """Outcome of a warm start."""

    num_steps: int
    """Steps made, including those before an interruption."""
    stop_reason: str
    """Why the warm start ended, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartProgress:
    """A warm start right after the update of a step, before its evaluation and its log line."""

    step: int
    """Supervised steps made."""
    loss: float
    """Loss of the update in nats per token."""
    grad_norm: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartCheckpointing:
    """Hooks that make a warm start resumable."""

    last_step: WarmStartProgress | None = None
    """The step to continue from; None starts from the beginning."""
    defer_signals: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager that defers signals to the end of its body."""
    record_step: Callable[[WarmStartProgress], None] = lambda progress: None
    """Called after each step, while signals are deferred."""


def reached_target(evaluation: EvalResult, sft: SftConfig) -> bool:
    """Return whether success is high enough overall and on every data source."""
    weakest = min(evaluation.success_by_source.values(), default=0.0)
    return evaluation.success >= sft.target_success_rate and weakest >= MIN_SOURCE_SUCCESS


def run_warm_start(
    components: Components,
    config: TrainConfig,
    logger: RunLogger,
    checkpointing: WarmStartCheckpointing | None = None,
) -> WarmStartResult:
    """Train on demonstrations; return with the engines serving the trained weights."""
    checkpointing = checkpointing or WarmStartCheckpointing()
    num_done = checkpointing.last_step.step if checkpointing.last_step else 0
    with logger.stage("warm start", config.sft.max_steps, num_done=num_done):
        result = _run_sft_steps(components, config, logger, checkpointing)
    components.policy.reset_optimizer()
    logger.print_line(f"warm start ended after {result.num_steps} steps: {result.stop_reason}")
    return result


def _run_sft_steps(
    components: Components,
    config: TrainConfig,
    logger: RunLogger,
    checkpointing: WarmStartCheckpointing,
) -> WarmStartResult:
    sft, progress = config.sft, checkpointing.last_step
    assert components.make_demonstration_batches is not None
    next_batch = components.make_demonstration_batches()
    for _ in range(progress.step if progress else 0):
        next_batch(sft.batch_size)
    done = False
    for step in range(progress.step if progress else 1, sft.max_steps + 1):
        if progress is None or progress.step < step:
            with checkpointing.defer_signals(), logger.phase_timer.phase("update"):
                stats = components.policy.sft_step(next_batch(sft.batch_size))
                progress = WarmStartProgress(
                    step=step,
                    loss=stats.loss,
                    grad_norm=stats.grad_norm,
                    num_tokens=stats.num_tokens,
                )
                checkpointing.record_step(progress)
        metrics = {"loss": progress.loss, "grad_norm": progress.grad_norm}
        if step == sft.max_steps or step % EVAL_EVERY_STEPS == 0:
            evaluation = _evaluate_dev_set(components, config, logger, step)
            metrics |= evaluation.to_metrics("dev")
            done = reached_target(evaluation, sft)
        logger.log_sft_step(step, metrics, num_tokens=progress.num_tokens)
        if done:
            return WarmStartResult(
                step, f"success on dev questions reached {sft.target_success_rate:g}"
            )
    return WarmStartResult(
        sft.max_steps, f"sft.max_steps={sft.max_steps} reached before sft.target_success_rate"
    )


def _evaluate_dev_set(
    components: Components, config: TrainConfig, logger: RunLogger, step: int
) -> EvalResult:
    with logger.phase_timer.phase("weight_sync"):
        components.policy.sync_weights(components.generator, components.generator.version + 1)
    with logger.phase_timer.phase("dev_eval"):
        return evaluate(
            components,
            config,
            first_questions(components.dev_prompts, config.evaluate.num_questions),
            num_samples=1,
            temperature=config.rollout.temperature,
            name=f"dev-{step}",
            metric_names=logger.metric_names,
        )

"""The supervised warm start: imitation until the policy samples some successes, then stop.

It ends when success on the development questions reached `sft.target_success` twice in a
row and every data source a twentieth (no skill still at zero), or after `sft.max_steps`.
Success is sampled through the rollout engine with the weights just sent, the same way RL will
sample. A warm start that was stopped goes on behind its last supervised step (`Imitated`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.train.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from mega_agentrl.config.policy_schema import SftConfig
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.session import Session
    from mega_agentrl.types.parts import Parts

MIN_SOURCE_SUCCESS = 0.05
CHECK_EVERY = 50
"""Steps between two checks, which cost as much as a few steps each."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Steps made and why it ended."""

    num_steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitated:
    """A warm start right behind the update of a step, whose check and report are still to come.

    num_ready: checks in a row before it that were ready. The rest is what its update said.
    """

    step: int
    num_ready: int
    loss: float
    grad_norm: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How a warm start is kept safe. done: the step it goes on from, None from the beginning.

    shield: signals wait for the end of its body. note: told of each step, in the shield.
    """

    done: Imitated | None = None
    shield: Callable[[], AbstractContextManager[None]] = nullcontext
    note: Callable[[Imitated], None] = lambda imitated: None


def is_ready(evaluation: Evaluation, sft: SftConfig) -> bool:
    """Success is high enough overall and no data source is still near zero."""
    weakest = min(evaluation.success_by_source.values(), default=0.0)
    return evaluation.success >= sft.target_success and weakest >= MIN_SOURCE_SUCCESS


def warm_start(
    parts: Parts, config: TrainConfig, session: Session, keeping: Keeping | None = None
) -> WarmStart:
    """Train on demonstrations; returns with the engines serving the trained weights."""
    keeping = keeping or Keeping()
    num_done = keeping.done.step if keeping.done else 0
    with session.stage("warm start", config.sft.max_steps, num_done=num_done):
        result = _imitate(parts, config, session, keeping)
    parts.policy.reset_optimizer()
    session.note(f"warm start ended after {result.num_steps} steps: {result.reason}")
    return result


def _imitate(parts: Parts, config: TrainConfig, session: Session, keeping: Keeping) -> WarmStart:
    sft, done = config.sft, keeping.done
    assert parts.demonstrations is not None
    next_batch = parts.demonstrations()
    for _ in range(done.step if done else 0):
        next_batch(sft.batch_size)
    num_ready = done.num_ready if done else 0
    for step in range(done.step if done else 1, sft.max_steps + 1):
        if done is None or done.step < step:
            with keeping.shield(), session.clock.phase("update"):
                stats = parts.policy.supervise(next_batch(sft.batch_size))
                done = Imitated(
                    step=step,
                    num_ready=num_ready,
                    loss=stats.loss,
                    grad_norm=stats.grad_norm,
                    num_tokens=stats.num_tokens,
                )
                keeping.note(done)
        metrics = {"loss": done.loss, "grad_norm": done.grad_norm}
        if step == sft.max_steps or step % CHECK_EVERY == 0:
            evaluation = _check(parts, config, session, step)
            num_ready = num_ready + 1 if is_ready(evaluation, sft) else 0
            metrics |= evaluation.as_metrics("dev")
        session.report_sft(step, metrics, num_tokens=done.num_tokens)
        if num_ready == 2:
            return WarmStart(
                step, f"success on dev questions reached {sft.target_success:g} twice in a row"
            )
    return WarmStart(sft.max_steps, f"sft.max_steps={sft.max_steps} came before sft.target_success")


def _check(parts: Parts, config: TrainConfig, session: Session, step: int) -> Evaluation:
    with session.clock.phase("send"):
        parts.policy.send_weights(parts.generator, parts.generator.version + 1)
    with session.clock.phase("check"):
        return evaluate(
            parts,
            config,
            parts.dev[: config.evaluate.num_questions or None],
            num_samples=1,
            temperature=config.rollout.temperature,
            name=f"dev-{step}",
        )

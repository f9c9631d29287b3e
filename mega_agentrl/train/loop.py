"""The run as an algorithm: warm start, evaluation, RL steps with evaluations, evaluation.

Every trajectory of a step is sampled with the weights the step updates, but for the beginnings
that `rollout.carry_over` brings along; or, under `rollout.staleness`, with weights that are a few
updates older, while earlier steps learn: who waits for whom then is in `ahead`. What the verbs do
is in `phases`, `rewards`, `steering`, `values`, `evaluate` and `supervised`; what is shown and kept
is in `session`; how a run ends early and goes on is in `stopping`, `safekeeping` and `resume`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.batch.pack import pack
from mega_agentrl.train.ahead import InStep, open_rollouts
from mega_agentrl.train.evaluate import HeldOut, evaluate_held_out
from mega_agentrl.train.profiling import begin_profile, end_profile
from mega_agentrl.train.resume import take_up
from mega_agentrl.train.rewards import settle_rewards
from mega_agentrl.train.safekeeping import Safekeeping
from mega_agentrl.train.session import Session
from mega_agentrl.train.steering import (
    Lesson,
    first_controllers,
    leave_out_mastered,
    make_lesson,
    next_controllers,
    record_accuracies,
)
from mega_agentrl.train.stopping import Stopper
from mega_agentrl.train.supervised import warm_start
from mega_agentrl.train.values import add_values, update_models

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.rollout.groups import GroupCollector
    from mega_agentrl.train.ahead import Rollouts
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.types.parts import Parts


def train(parts: Parts, config: TrainConfig, stopper: Stopper | None = None) -> float:
    """Run it all, or what is left of it; returns the held-out reward at the end.

    Raises `Stopped`, with the run saved, at a signal that the stopper heeds.
    """
    stopper = stopper or Stopper()
    parts = replace(parts, wait=stopper.waiting(parts.wait))
    state = take_up(parts, config)
    with (
        Session(Path(config.run_dir), config, watch=parts.watch) as session,
        Safekeeping(parts, config, session, stopper, state) as kept,
    ):
        session.started(parts.start_s)
        if config.validates_only:
            session.note("validation only: no step is asked for, nothing is trained or exported")
        if not kept.is_begun:
            begin(parts, config, session, kept)
            kept.started()
        if (before := kept.before) is None:
            with session.stage("held out before", 1):
                before = kept.evaluated(_evaluate(parts, config, session, "before"))
        after = learn(parts, config, session, kept) if config.total_steps else before
        if not config.validates_only:
            parts.policy.export(session.run_dir / "model")
        session.finish(before, after)
    return after.sampled.reward


def begin(parts: Parts, config: TrainConfig, session: Session, kept: Safekeeping) -> None:
    """The warm start, or the weights as they are; returns with the engines serving them."""
    if parts.demonstrations is not None:
        warm_start(parts, config, session, kept.warm_start())
    else:
        parts.policy.send_weights(parts.generator, version=1)


def learn(parts: Parts, config: TrainConfig, session: Session, kept: Safekeeping) -> HeldOut:
    """All steps of RL that are left, and what they gave."""
    controllers = kept.controllers or first_controllers(parts, config, session)
    with (
        session.stage("RL", config.total_steps, num_done=kept.step),
        open_rollouts(parts, config, kept, kept.stopper) as rollouts,
    ):
        for step in range(kept.step + 1, config.total_steps + 1):
            if kept.owes_evaluation:
                _evaluate(parts, config, session, "during")
                kept.evaluated_within()
            task = prepare_step(parts, config, session, rollouts, controllers, step)
            with kept.stopper.shielded():
                controllers = take_step(parts, config, session, rollouts, controllers, step, task)
                kept.stepped(step, controllers)
    with session.stage("held out after", 1):
        return _evaluate(parts, config, session, "after")


def _evaluate(parts: Parts, config: TrainConfig, session: Session, when: str) -> HeldOut:
    with session.clock.phase("evaluate"):
        held_out = evaluate_held_out(parts, config, partial(session.keep_held_out, when))
    return session.show_held_out(when, held_out)


@dataclass(frozen=True, slots=True)
class StepTask:
    """What a step learns, and the rollout it learns it from."""

    collected: Collected
    lesson: Lesson


def train_step(
    parts: Parts,
    config: TrainConfig,
    session: Session,
    groups: GroupCollector,
    controllers: Controllers,
    step: int,
) -> Controllers:
    """One synchronous step of RL; returns the controllers of the next one."""
    rollouts = InStep(parts, groups)
    task = prepare_step(parts, config, session, rollouts, controllers, step)
    return take_step(parts, config, session, rollouts, controllers, step, task)


def prepare_step(
    parts: Parts,
    config: TrainConfig,
    session: Session,
    rollouts: Rollouts,
    controllers: Controllers,
    step: int,
) -> StepTask:
    """Everything before the update. Changes nothing but which prompts are settled."""
    phase = session.clock.phase
    leave_out_mastered(parts, config, controllers)
    with phase("rollout"):
        collected = rollouts.take(step)
        batch = pack(collected.trees)
    begin_profile(parts, config, step)
    with phase("logprob"):
        batch = add_values(parts, parts.policy.add_logprobs(batch))
    with phase("reward"):
        collected, batch = settle_rewards(parts, collected, batch)
    with phase("advantage"):
        lesson = make_lesson(parts, config, controllers, collected, batch)
    return StepTask(collected, lesson)


def take_step(
    parts: Parts,
    config: TrainConfig,
    session: Session,
    rollouts: Rollouts,
    controllers: Controllers,
    step: int,
    task: StepTask,
) -> Controllers:
    """The update and all that follows from it; in the middle of it nothing can be saved."""
    phase, lesson, collected = session.clock.phase, task.lesson, task.collected
    with phase("update"):
        stats, valued = update_models(parts, config, lesson, step)
    end_profile(parts, config, step)
    with phase("rollout"):
        rollouts.wait_before_send()
    with phase("advantage"):
        controllers, shown = next_controllers(parts, config, controllers, lesson, collected, stats)
        record_accuracies(parts, collected)
        # Again: with the new weights the rollouts of a coming step may begin.
        leave_out_mastered(parts, config, controllers)
    with phase("send"):
        sent = parts.policy.send_weights(parts.generator, parts.generator.version + 1)
    rollouts.sent(step)
    figures = {**lesson.metrics, **shown, **valued}
    session.report_step(step, collected, lesson.batch, stats, figures, sent)
    return controllers

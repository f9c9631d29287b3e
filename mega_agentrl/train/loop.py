"""The run as an algorithm: warm start, evaluation, RL steps, evaluation.

Synchronous: every trajectory of a step is sampled with the weights the step updates, but for
the beginnings that `rollout.carry_over` brings along. What the verbs do is in `phases`, `rewards`,
`steering`, `evaluate` and `supervised`; what is shown and kept is in `session`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.batch.pack import pack
from mega_agentrl.train.evaluate import HeldOut, evaluate_held_out
from mega_agentrl.train.phases import collect_groups, open_groups
from mega_agentrl.train.rewards import settle_rewards
from mega_agentrl.train.session import Session
from mega_agentrl.train.steering import (
    first_controllers,
    leave_out_mastered,
    make_lesson,
    next_controllers,
)
from mega_agentrl.train.supervised import warm_start

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.groups import GroupCollector
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.types.parts import Parts


def train(parts: Parts, config: TrainConfig) -> float:
    """Run it all; returns the held-out reward at the end."""
    with Session(Path(config.run_dir), config) as session:
        session.started(parts.start_s)
        if parts.demonstrations is not None:
            warm_start(parts, config, session)
        else:
            parts.policy.send_weights(parts.generator, version=1)
        with session.stage("held out before", 1):
            before = _evaluate(parts, config, session, "before")
        after = learn(parts, config, session) if config.total_steps else before
        parts.policy.export(session.run_dir / "model")
        session.finish(before, after)
    return after.sampled.reward


def learn(parts: Parts, config: TrainConfig, session: Session) -> HeldOut:
    """All steps of RL, and what they gave."""
    controllers = first_controllers(parts, config, session)
    with session.stage("RL", config.total_steps), open_groups(parts, config) as groups:
        for step in range(1, config.total_steps + 1):
            controllers = train_step(parts, config, session, groups, controllers, step)
    with session.stage("held out after", 1):
        return _evaluate(parts, config, session, "after")


def _evaluate(parts: Parts, config: TrainConfig, session: Session, when: str) -> HeldOut:
    held_out = evaluate_held_out(parts, config, partial(session.keep_held_out, when))
    return session.show_held_out(when, held_out)


def train_step(
    parts: Parts,
    config: TrainConfig,
    session: Session,
    groups: GroupCollector,
    controllers: Controllers,
    step: int,
) -> Controllers:
    """One step of RL; returns the controllers of the next one."""
    phase = session.clock.phase
    leave_out_mastered(parts, config, controllers)
    with phase("rollout"):
        collected = collect_groups(parts, groups, step)
        batch = pack(collected.trees)
    with phase("logprob"):
        batch = parts.policy.add_logprobs(batch)
    with phase("reward"):
        collected, batch = settle_rewards(parts, collected, batch)
    with phase("advantage"):
        lesson = make_lesson(parts, config, controllers, collected, batch)
    with phase("update"):
        stats = parts.policy.update(lesson.batch, lesson.kl_weight_BT)
    with phase("advantage"):
        controllers, shown = next_controllers(parts, config, controllers, lesson, collected, stats)
    with phase("send"):
        sent = parts.policy.send_weights(parts.generator, parts.generator.version + 1)
    session.report_step(step, collected, lesson.batch, stats, {**lesson.metrics, **shown}, sent)
    return controllers

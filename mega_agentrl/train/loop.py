"""The run as an algorithm: warm start, evaluation, RL steps, evaluation.

Synchronous: every trajectory of a step is sampled with the weights the step updates. What
the verbs do is in `phases`, `evaluate` and `supervised`; what is shown and kept is in
`session`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.batch.pack import pack
from mega_agentrl.train.evaluate import HeldOut, evaluate_held_out
from mega_agentrl.train.phases import add_advantages, collect_trees
from mega_agentrl.train.session import Session
from mega_agentrl.train.supervised import warm_start

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
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
            before = session.show_held_out("before", evaluate_held_out(parts, config))
        after = learn(parts, config, session) if config.total_steps else before
        parts.policy.export(session.run_dir / "model")
        session.finish(before, after)
    return after.sampled.reward


def learn(parts: Parts, config: TrainConfig, session: Session) -> HeldOut:
    """All steps of RL, and what they gave."""
    with session.stage("RL", config.total_steps):
        for step in range(1, config.total_steps + 1):
            train_step(parts, config, session, step)
    with session.stage("held out after", 1):
        return session.show_held_out("after", evaluate_held_out(parts, config))


def train_step(parts: Parts, config: TrainConfig, session: Session, step: int) -> None:
    """One step of RL."""
    phase = session.clock.phase
    with phase("rollout"):
        prompts = parts.prompts.next(config.data.prompts_per_step)
        trees = collect_trees(parts, config, prompts, step)
        batch = pack(trees)
    with phase("logprob"):
        batch = parts.policy.add_logprobs(batch)
    with phase("advantage"):
        batch = add_advantages(batch, config.algo)
    with phase("update"):
        stats = parts.policy.update(batch)
    with phase("send"):
        sent = parts.policy.send_weights(parts.generator, parts.generator.version + 1)
    session.report_step(step, trees, batch, stats, sent)

"""Rewards that come after the rollout: of functions and models that others run.

A step without a filter does not wait for them: what they work on meanwhile is the step's own
log-prob pass. `settle_rewards` waits, fills `reward_B` and the trees' scores, and adds what a
reward model in a folder says, which reads whole batches. A trajectory whose reward could not be
had is masked from the loss and counted, `reward/failed`.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from mega_agentrl.batch.pack import pack, with_rewards
from mega_agentrl.rollout.scoring import settle
from mega_agentrl.types.records import RolloutTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.parts import Parts
    from mega_agentrl.types.records import Trajectory

_logger = logging.getLogger(__name__)


def settle_rewards(
    parts: Parts, collected: Collected, batch: TrainBatch
) -> tuple[Collected, TrainBatch]:
    """The step with all of its rewards; batch: packed of `collected.trees`.

    Waits for: who works on the rewards. Unblocked by: their deadlines. The trees of `collected`
    are scored in place. Raises `ValueError` where no trajectory is left to train on.
    """
    settle(collected.pending)
    same = len(collected.seen) == len(collected.trees)
    add_model_scores(parts, collected.seen, batch if same else None)
    greedy = [_alone(tree.greedy) for tree in collected.seen if tree.greedy is not None]
    add_model_scores(parts, greedy)
    report_missing(collected.seen)
    return collected, with_rewards(batch, collected.trees)


def add_model_scores(
    parts: Parts, trees: Sequence[RolloutTree], batch: TrainBatch | None = None
) -> None:
    """Add what the reward model says to the scores of the trees, where their rubric has it.

    batch: packed of all of these trees; None packs those that it takes.
    """
    model = parts.reward_model
    if model is None:
        return
    if batch is None:
        trees = [tree for tree in trees if parts.rubric.needs_model(tree.prompt) and _scored(tree)]
        if not trees:
            return
        batch = pack(trees)
    everyone = [trajectory for tree in trees for trajectory in tree.trajectories]
    owners = range(len(everyone)) if batch.owner_B is None else batch.owner_B.tolist()
    # Of a trajectory that is several rows the last one ends as it did.
    last_row = {owner: row for row, owner in enumerate(owners)}
    said_B = model.scores(batch).tolist()
    for owner, trajectory in enumerate(everyone):
        if trajectory.score is None or not parts.rubric.needs_model(trajectory.prompt):
            continue
        value = float(said_B[last_row[owner]])
        if math.isfinite(value):
            trajectory.score = parts.rubric.with_model(trajectory, value)
        else:
            trajectory.score = None
            trajectory.no_reward = f"the reward model gave {value}"


def report_missing(trees: Sequence[RolloutTree]) -> None:
    """Warn once of the rewards of these trees that could not be had."""
    without = [one for tree in trees for one in tree.trajectories if one.no_reward]
    if without:
        first = without[0]
        _logger.warning(
            "%d trajectories have no reward and are not trained on; the first, %s: %s",
            len(without),
            first.trajectory_id,
            first.no_reward,
        )


def _alone(answer: Trajectory) -> RolloutTree:
    return RolloutTree(prompt=answer.prompt, trajectories=[answer])


def _scored(tree: RolloutTree) -> list[Trajectory]:
    return [one for one in tree.trajectories if one.score is not None]

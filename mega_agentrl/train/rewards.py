"""Rewards that arrive after the rollout, from functions and models in other processes.

Without a group filter they are computed while the policy does its log-prob pass; where none is
missing, the rows without signal are known before it (`row_signal`). `RewardResolver`
waits for them, fills `reward_B` and the trees' scores, and adds the score of a reward model in a
folder, which reads whole batches. A trajectory without a reward is masked from the loss and counted
in `reward/failed_fraction`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mega_agentrl.batch.packing import fill_rewards, pack_trees
from mega_agentrl.rollout.groups.scoring import resolve_scores
from mega_agentrl.train.trajectory_rows import row_trajectories
from mega_agentrl.types.errors import RewardError
from mega_agentrl.types.records import RolloutTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.groups.batch_collector import RolloutBatch
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.components import Components

_logger = logging.getLogger(__name__)


class RewardResolver:
    """Waits for the rewards of a step."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def are_known(self, rollout_batch: RolloutBatch) -> bool:
        """Return whether all rewards of a step are there, so that `resolve` waits for nothing."""
        return not rollout_batch.pending_scores and self._components.reward_model is None

    def resolve(self, rollout_batch: RolloutBatch, batch: TrainBatch) -> TrainBatch:
        """Return the batch with all of its rewards; the trees are scored in place.

        Waits for the reward workers, which have deadlines.

        Args:
            rollout_batch: The rollouts of the step.
            batch: Packed from `rollout_batch.trees`.

        Raises:
            ValueError: No trajectory is left to train on.
        """
        resolve_scores(rollout_batch.pending_scores)
        is_unfiltered = len(rollout_batch.finished_trees) == len(rollout_batch.trees)
        add_reward_model_scores(
            self._components, rollout_batch.finished_trees, batch if is_unfiltered else None
        )
        greedy = [
            RolloutTree(prompt=answer.prompt, trajectories=[answer])
            for tree in rollout_batch.finished_trees
            if (answer := tree.greedy_trajectory) is not None
        ]
        add_reward_model_scores(self._components, greedy)
        warn_missing_rewards(rollout_batch.finished_trees, "are not trained on")
        return fill_rewards(batch, rollout_batch.trees)


def add_reward_model_scores(
    components: Components, trees: Sequence[RolloutTree], batch: TrainBatch | None = None
) -> None:
    """Add the reward model's score to those trees whose rubric uses it.

    Args:
        components: The components of the run.
        trees: Trees that the rubric has scored; changed in place.
        batch: Packed from all of these trees; None packs those that need it.
    """
    model = components.reward_model
    if model is None:
        return
    if batch is None:
        trees = [
            tree
            for tree in trees
            if components.rubric.needs_reward_model(tree.prompt) and _has_scores(tree)
        ]
        if not trees:
            return
        images = components.images
        batch = pack_trees(trees if images is None else images.load_trees(trees))
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    # A trajectory with several rows is scored by its last one, which has its end.
    last_row = {owner: row for row, owner in enumerate(row_trajectories(batch))}
    model_score_B = model.compute_scores(batch).tolist()
    for owner, trajectory in enumerate(trajectories):
        if trajectory.score is None or not components.rubric.needs_reward_model(trajectory.prompt):
            continue
        value = float(model_score_B[last_row[owner]])
        try:
            trajectory.score = components.rubric.add_model_score(trajectory, value)
        except RewardError as error:
            trajectory.score = None
            trajectory.reward_error = str(error)


def warn_missing_rewards(trees: Sequence[RolloutTree], consequence: str) -> None:
    """Log one warning about the trajectories that have no reward, with its consequence."""
    unrewarded = [
        trajectory for tree in trees for trajectory in tree.trajectories if trajectory.reward_error
    ]
    if unrewarded:
        first = unrewarded[0]
        _logger.warning(
            "%d trajectories have no reward and %s; the first, %s: %s",
            len(unrewarded),
            consequence,
            first.trajectory_id,
            first.reward_error,
        )


def _has_scores(tree: RolloutTree) -> bool:
    return any(trajectory.score is not None for trajectory in tree.trajectories)

"""Which reward a run uses: `ports.Rubric` over the configured ARPO rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.config.choices import RewardRule
from mega_agentrl.reward.arpo import score, score_strict

if TYPE_CHECKING:
    from mega_agentrl.config.schema import RewardConfig
    from mega_agentrl.types.records import Score, Trajectory


class ArpoRubric:
    """Scores a finished trajectory by `config.rule`."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    def score(self, trajectory: Trajectory) -> Score:
        """The reward; raises nothing for what the policy wrote."""
        threshold = self._config.correct_threshold
        if self._config.rule is RewardRule.released:
            return score(trajectory.response_text, trajectory.prompt.ground_truth, threshold)
        return score_strict(trajectory, threshold)

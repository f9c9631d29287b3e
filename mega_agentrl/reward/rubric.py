"""Which reward a run uses: `ports.Rubric` over the configured ARPO rule and the tools' rewards.

    value = rule + sum over tools of weight * (sum of step rewards + final reward)

The weights are `reward.tools`; a tool that was not used, or gives no reward, adds nothing. The
rule alone decides about `correct`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import RewardRule
from mega_agentrl.reward.arpo import score, score_strict

if TYPE_CHECKING:
    from collections.abc import Collection

    from mega_agentrl.config.schema import RewardConfig
    from mega_agentrl.types.records import Score, Trajectory


class ArpoRubric:
    """Scores a finished trajectory by `config.rule`, and adds what its tools gave."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config

    def score(self, trajectory: Trajectory) -> Score:
        """The reward; raises nothing for what the policy wrote."""
        rule = self._rule(trajectory)
        if not self._config.tools:
            return rule
        steps, final = trajectory.step_rewards, trajectory.tool_rewards
        parts = {"rule": rule.value}
        for name, weight in self._config.tools.items():
            parts[f"tool/{name}"] = weight * (sum(steps.get(name, ())) + final.get(name, 0.0))
        return replace(rule, value=sum(parts.values()), parts=parts)

    def _rule(self, trajectory: Trajectory) -> Score:
        threshold = self._config.correct_threshold
        if self._config.rule is RewardRule.released:
            return score(trajectory.response_text, trajectory.prompt.ground_truth, threshold)
        return score_strict(trajectory, threshold)


def check_tool_weights(config: RewardConfig, names: Collection[str]) -> None:
    """Raise `ValueError` for a weight of a tool that the run does not have."""
    for name in config.tools:
        if name not in names:
            raise ValueError(
                f"reward.tools.{name}={config.tools[name]}: there is no such tool, expected one "
                f"of {', '.join(names)}; probable cause: a mistyped name, or tool.file is not set"
            )

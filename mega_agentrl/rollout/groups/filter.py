"""Filter of finished groups by the mean of a metric.

A group is trained on if the mean of `rollout.filter_metric` over its valid trajectories, those that
did not fail, lies strictly inside `rollout.filter_range`. A group with fewer than two valid
trajectories is rejected, because nothing can be compared. Without a metric every group is accepted,
even if all its trajectories failed.

To add a metric:

1. Add a choice to `config.enums.FilterMetric`.
2. Return its value for a score in `_metric_value`.
3. Add a case to `tests/rollout/groups/test_filter.py`.
"""

from __future__ import annotations

from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, assert_never

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.rollout.groups.scoring import valid_scores

if TYPE_CHECKING:
    from mega_agentrl.config.sections.rollout import GroupSelectionConfig
    from mega_agentrl.types.records import RolloutTree, Score

MIN_VALID_TRAJECTORIES = 2


class FilterResult(StrEnum):
    """Whether a group is trained on, or why it is rejected."""

    accepted = "kept"
    below_range = "low"
    """The mean is at or below `rollout.filter_range[0]`."""
    above_range = "high"
    """The mean is at or above `rollout.filter_range[1]`."""
    too_few_valid = "failed"
    """Fewer than `MIN_VALID_TRAJECTORIES` did not fail."""


def filter_group(tree: RolloutTree, config: GroupSelectionConfig) -> FilterResult:
    """Apply the configured filter to a scored tree."""
    if config.filter_metric is FilterMetric.none:
        return FilterResult.accepted
    mean = group_metric_mean(tree, config.filter_metric)
    if mean is None:
        return FilterResult.too_few_valid
    low, high = config.filter_range
    if mean <= low:
        return FilterResult.below_range
    return FilterResult.above_range if mean >= high else FilterResult.accepted


def group_metric_mean(tree: RolloutTree, metric: FilterMetric) -> float | None:
    """Return the mean over the valid trajectories, or None with too few of them."""
    scores = valid_scores(tree.trajectories)
    if len(scores) < MIN_VALID_TRAJECTORIES:
        return None
    return fmean(_metric_value(score, metric) for score in scores)


def _metric_value(score: Score, metric: FilterMetric) -> float:
    match metric:
        case FilterMetric.accuracy:
            return float(score.correct)
        case FilterMetric.reward:
            return score.value
        case FilterMetric.none:
            raise ConfigError("rollout.filter_metric", "none", "a metric to filter by")
        case _:
            assert_never(metric)

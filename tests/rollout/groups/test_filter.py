"""The filter is strictly between its bounds, over trajectories that did not fail."""

from __future__ import annotations

import pytest

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.sections.rollout import GroupSelectionConfig
from mega_agentrl.rollout.groups.filter import FilterResult, filter_group, group_metric_mean
from tests.config.refusals import refused
from tests.fakes import make_scored_tree

ACCURACY = GroupSelectionConfig(filter_metric=FilterMetric.accuracy)
REWARD = GroupSelectionConfig(filter_metric=FilterMetric.reward, filter_range=[-0.5, 0.5])
NO_FILTER = GroupSelectionConfig()


@pytest.mark.parametrize(
    ("rewards", "config", "result"),
    [
        ((0, 0, 0, 0), ACCURACY, FilterResult.below_range),
        ((1, 0, 0, 0), ACCURACY, FilterResult.accepted),
        ((1, 1, 1, 0.5), ACCURACY, FilterResult.accepted),
        ((1, 1.1, 1, 1), ACCURACY, FilterResult.above_range),
        # The bounds themselves are outside.
        ((0.5, 0.5), REWARD, FilterResult.above_range),
        ((-1, 0), REWARD, FilterResult.below_range),
        ((0.25, 0.5), REWARD, FilterResult.accepted),
        # None is a trajectory that failed: it has no part in the mean, and one valid is too few.
        ((1, 0, None, None, None), ACCURACY, FilterResult.accepted),
        ((1, 1, None, None), ACCURACY, FilterResult.above_range),
        ((1, None, None, None), ACCURACY, FilterResult.too_few_valid),
        ((None, None, None, None), ACCURACY, FilterResult.too_few_valid),
        ((1, 1), NO_FILTER, FilterResult.accepted),
        ((None, None, None, None), NO_FILTER, FilterResult.accepted),
    ],
)
def test_groups_by_the_mean_of_their_valid_trajectories(rewards, config, result):
    assert filter_group(make_scored_tree(*rewards), config) is result


def test_without_a_metric_there_is_no_mean():
    error = refused(group_metric_mean, make_scored_tree(1, 1), FilterMetric.none)
    assert error.key == "rollout.filter_metric"

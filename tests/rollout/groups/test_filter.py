"""The filter is strictly between its bounds, over trajectories that did not fail."""

from __future__ import annotations

import pytest

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.sections.rollout import GroupConfig
from mega_agentrl.rollout.groups.filter import FilterResult, filter_group, group_metric_mean
from tests.fakes import make_scored_tree


@pytest.mark.parametrize(
    ("values", "result"),
    [
        ((0, 0, 0, 0), FilterResult.below_range),
        ((1, 0, 0, 0), FilterResult.accepted),
        ((1, 1, 1, 0.5), FilterResult.accepted),
        ((1, 1.1, 1, 1), FilterResult.above_range),
    ],
)
def test_groups_without_variation_are_rejected(values, result):
    assert (
        filter_group(make_scored_tree(*values), GroupConfig(filter_metric=FilterMetric.accuracy))
        is result
    )


def test_the_bounds_themselves_are_outside():
    config = GroupConfig(filter_metric=FilterMetric.reward, filter_range=[-0.5, 0.5])
    assert filter_group(make_scored_tree(0.5, 0.5), config) is FilterResult.above_range
    assert filter_group(make_scored_tree(-1, 0), config) is FilterResult.below_range
    assert filter_group(make_scored_tree(0.25, 0.5), config) is FilterResult.accepted


def test_failed_trajectories_have_no_part_in_the_mean():
    assert group_metric_mean(make_scored_tree(1, 0, *[None] * 6), FilterMetric.accuracy) == 0.5
    assert group_metric_mean(make_scored_tree(1, 1, *[None] * 2), FilterMetric.accuracy) == 1


def test_one_valid_trajectory_is_too_few():
    config = GroupConfig(filter_metric=FilterMetric.accuracy)
    assert filter_group(make_scored_tree(1, *[None] * 3), config) is FilterResult.too_few_valid
    assert filter_group(make_scored_tree(*[None] * 4), config) is FilterResult.too_few_valid
    assert filter_group(make_scored_tree(1, 0, *[None] * 3), config) is FilterResult.accepted


def test_without_a_metric_everything_is_accepted():
    assert filter_group(make_scored_tree(1, 1), GroupConfig()) is FilterResult.accepted
    assert filter_group(make_scored_tree(*[None] * 4), GroupConfig()) is FilterResult.accepted
    with pytest.raises(ValueError, match="filter_metric=none"):
        group_metric_mean(make_scored_tree(1, 1), FilterMetric.none)

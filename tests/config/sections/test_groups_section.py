"""Ranges of the group settings in `rollout.*`."""

from __future__ import annotations

import math
import re

import pytest

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.config.sections.groups import GroupConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("filter_range", [math.nan, 0.9]),
        ("filter_range", [0.99, 0.99]),
        ("filter_range", [0.0, math.inf]),
        ("filter_range", [0.5]),
        ("num_oversampled_prompts", -1),
        ("min_finished_fraction", 0.0),
        ("min_finished_fraction", 1.5),
        ("straggler_timeout_s", -1.0),
        ("straggler_timeout_s", math.inf),
    ],
)
def test_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"rollout\.{key}={re.escape(str(value))}: expected"):
        GroupConfig(**{key: value})


def test_a_fraction_needs_a_timeout_and_partial_rollout_excludes_a_trajectory_timeout():
    with pytest.raises(ValueError, match=r"rollout\.straggler_timeout_s=0.0: expected more than 0"):
        GroupConfig(min_finished_fraction=0.5)
    GroupConfig(min_finished_fraction=0.5, straggler_timeout_s=1.0)
    with pytest.raises(ValueError, match=r"rollout\.trajectory_timeout_s=60.0: expected 0 with"):
        RolloutConfig(partial_rollout=True, trajectory_timeout_s=60.0)


def test_defaults_filter_nothing():
    config = RolloutConfig()
    assert config.filter_metric is FilterMetric.none
    assert config.filter_range == [0.01, 0.99]
    assert (
        config.num_oversampled_prompts,
        config.min_finished_fraction,
        config.partial_rollout,
    ) == (0, 1, False)


def test_the_ranges_hold_for_the_rollout_section_too():
    with pytest.raises(ValueError, match=r"rollout\.num_oversampled_prompts=-3"):
        RolloutConfig(num_oversampled_prompts=-3)

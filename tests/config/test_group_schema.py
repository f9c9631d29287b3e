"""Groups: ranges, with the key and the value in the error."""

from __future__ import annotations

import math
import re

import pytest

from mega_agentrl.config.choices import FilterKey
from mega_agentrl.config.group_schema import GroupConfig
from mega_agentrl.config.schema import RolloutConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("filter_range", [math.nan, 0.9]),
        ("filter_range", [0.99, 0.99]),
        ("filter_range", [0.0, math.inf]),
        ("filter_range", [0.5]),
        ("oversample", -1),
        ("quorum", 0.0),
        ("quorum", 1.5),
        ("straggler_s", -1.0),
        ("straggler_s", math.inf),
    ],
)
def test_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"rollout\.{key}={re.escape(str(value))}: expected"):
        GroupConfig(**{key: value})


def test_a_quorum_needs_a_limit_and_carrying_over_allows_no_wall_clock():
    with pytest.raises(ValueError, match=r"rollout\.straggler_s=0.0: expected more than 0"):
        GroupConfig(quorum=0.5)
    GroupConfig(quorum=0.5, straggler_s=1.0)
    with pytest.raises(ValueError, match=r"rollout\.max_wall_s=60.0: expected 0 with"):
        RolloutConfig(carry_over=True, max_wall_s=60.0)


def test_nothing_is_filtered_by_default_and_the_bounds_are_the_papers():
    config = RolloutConfig()
    assert config.filter_key is FilterKey.none
    assert config.filter_range == [0.01, 0.99]
    assert (config.oversample, config.quorum, config.carry_over) == (0, 1, False)


def test_the_ranges_hold_for_the_rollout_section_too():
    with pytest.raises(ValueError, match=r"rollout\.oversample=-3"):
        RolloutConfig(oversample=-3)

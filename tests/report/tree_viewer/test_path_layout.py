"""Lanes of a tree's paths, by hand, and that no line crosses."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from mega_agentrl.report.tree_viewer.path_layout import assign_lanes, parent_indices
from tests.rollout.grown_trees import grown, nested_tree


def test_the_last_fork_is_nearest():
    paths = nested_tree().trajectories
    assert [one.path for one in paths] == [(0,), (0, 0), (0, 0, 0), (0, 1)]
    assert parent_indices(paths) == [None, 0, 1, 0]
    assert [one.fork_len for one in paths] == [0, 50, 101, 101]
    assert assign_lanes(paths) == [0, 2, 3, 1]


def test_of_forks_at_one_place_the_first_is_nearest():
    paths = nested_tree().trajectories
    paths[1].fork_len = paths[3].fork_len
    assert assign_lanes(paths) == [0, 1, 2, 3]


def test_a_missing_parent_is_refused():
    paths = nested_tree().trajectories
    with pytest.raises(ValueError, match=r"got the parent .*, expected one that comes earlier"):
        assign_lanes(paths[1:])
    assert assign_lanes([]) == []


@given(grown(rounds=False))
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
def test_no_fork_line_crosses_a_lane(tree):
    paths = list(tree.trajectories)
    lanes, parents = assign_lanes(paths), parent_indices(paths)
    assert sorted(lanes) == list(range(len(paths)))
    for number, parent in enumerate(parents):
        if parent is None:
            continue
        assert lanes[parent] < lanes[number]
        between = [
            one
            for one, lane in zip(paths, lanes, strict=True)
            if lanes[parent] < lane < lanes[number]
        ]
        assert all(one.fork_len >= paths[number].fork_len for one in between)

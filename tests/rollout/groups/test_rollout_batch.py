"""Counts of groups, and means before the filter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mega_agentrl.rollout.groups.filter import FilterResult
from mega_agentrl.rollout.groups.rollout_batch import RolloutBatch
from mega_agentrl.types.records import RolloutTree, Score, StopReason, Trajectory
from tests.fakes import make_prompt


def _tree(*values, versions=(1, 1)):
    prompt = make_prompt()
    trajectories = [
        Trajectory(
            trajectory_id=f"p0/0/{index}",
            prompt=prompt,
            path=(index,),
            token_ids=[65, 66, 67],
            loss_mask=[1, 0, 1],
            logps=[0.0] * 3,
            entropies=[0.0] * 3,
            versions=[versions[0], 0, versions[1]],
            turn_ids=[0] * 3,
            turns=[],
            stop_reason=StopReason.aborted if value is None else StopReason.eos,
            score=None
            if value is None
            else Score(value=value, correct=value >= 1, f1=0.0, answer="", reason=""),
        )
        for index, value in enumerate(values)
    ]
    return RolloutTree(prompt=prompt, trajectories=trajectories)


def test_metrics_by_hand():
    mixed, wrong, right = _tree(1, 0, None, versions=(2, 3)), _tree(0, 0), _tree(1, 1)
    collected = RolloutBatch(
        trees=[mixed],
        finished_trees=[wrong, mixed, right],
        filter_results=[FilterResult.below_range, FilterResult.accepted, FilterResult.above_range],
        version=3,
        group_counts={"num_stragglers": 4},
    )
    metrics = collected.metrics()
    assert metrics["rollout/num_groups_kept"] == 1
    assert (
        metrics["rollout/num_groups_filtered_low"]
        == metrics["rollout/num_groups_filtered_high"]
        == 1
    )
    assert metrics["rollout/num_groups_failed"] == 0 and metrics["rollout/num_stragglers"] == 4
    assert metrics["rollout/success_unfiltered"] == metrics["rollout/reward_unfiltered"] == 3 / 6
    # Of each trajectory's two sampled tokens one has the version before.
    assert metrics["rollout/stale_tokens_fraction"] == 0.5
    assert metrics["rollout/staleness_mean"] == 0.5 and metrics["rollout/staleness_max"] == 1
    # A step that begins one version later finds them all one version older.
    later = replace(collected, version=4).metrics()
    assert later["rollout/stale_tokens_fraction"] == 1
    assert later["rollout/staleness_mean"] == 1.5 and later["rollout/staleness_max"] == 2


def test_a_step_without_anything_has_zeros():
    metrics = RolloutBatch(
        trees=[], finished_trees=[], filter_results=[], version=1, group_counts={}
    ).metrics()
    assert set(metrics.values()) == {0.0}


def test_filter_results_and_trees_have_one_length():
    with pytest.raises(ValueError, match="got 1 filter results"):
        RolloutBatch(
            trees=[],
            finished_trees=[],
            filter_results=[FilterResult.accepted],
            version=1,
            group_counts={},
        )

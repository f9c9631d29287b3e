"""`rollout.filter`: strictly between the bounds, over the trajectories that did not fail."""

from __future__ import annotations

import pytest

from mega_agentrl.config.choices import FilterKey
from mega_agentrl.config.group_schema import GroupConfig
from mega_agentrl.rollout.filter import Verdict, group_mean, judge
from mega_agentrl.types.records import RolloutTree, Score, StopReason, Trajectory
from tests.fakes import make_prompt


def _tree(*values, failed=0):
    """A tree of scored trajectories, correct where the value is at least 1."""
    prompt = make_prompt()
    trajectories = [
        Trajectory(
            trajectory_id=f"p0/0/{index}",
            prompt=prompt,
            path=(index,),
            token_ids=[65],
            loss_mask=[1],
            logps=[0.0],
            entropies=[0.0],
            versions=[1],
            turn_ids=[0],
            turns=[],
            stop_reason=StopReason.eos if value is not None else StopReason.aborted,
            score=None
            if value is None
            else Score(value=value, correct=value >= 1, f1=0.0, answer="", reason=""),
        )
        for index, value in enumerate((*values, *[None] * failed))
    ]
    return RolloutTree(prompt=prompt, trajectories=trajectories)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0, 0, 0, 0), Verdict.low),
        ((1, 0, 0, 0), Verdict.kept),
        ((1, 1, 1, 0.5), Verdict.kept),
        ((1, 1.1, 1, 1), Verdict.high),
    ],
)
def test_groups_that_all_do_alike_are_not_kept(values, verdict):
    assert judge(_tree(*values), GroupConfig(filter_key=FilterKey.accuracy)) is verdict


def test_the_bounds_themselves_are_outside():
    config = GroupConfig(filter_key=FilterKey.reward, filter_range=[-0.5, 0.5])
    assert judge(_tree(0.5, 0.5), config) is Verdict.high
    assert judge(_tree(-1, 0), config) is Verdict.low
    assert judge(_tree(0.25, 0.5), config) is Verdict.kept


def test_failed_trajectories_have_no_part_in_the_mean():
    assert group_mean(_tree(1, 0, failed=6), FilterKey.accuracy) == 0.5
    assert group_mean(_tree(1, 1, failed=2), FilterKey.accuracy) == 1


def test_one_good_trajectory_is_too_few():
    config = GroupConfig(filter_key=FilterKey.accuracy)
    assert judge(_tree(1, failed=3), config) is Verdict.failed
    assert judge(_tree(failed=4), config) is Verdict.failed
    assert judge(_tree(1, 0, failed=3), config) is Verdict.kept


def test_without_a_key_everything_is_kept():
    assert judge(_tree(1, 1), GroupConfig()) is Verdict.kept
    assert judge(_tree(failed=4), GroupConfig()) is Verdict.kept
    with pytest.raises(ValueError, match="filter_key=none"):
        group_mean(_tree(1, 1), FilterKey.none)

"""Which finished groups are trained on: those whose trajectories do not all do alike.

A group is kept where low < mean of `filter_key` < high, `filter_range`, over the trajectories
that did not fail through our own fault. With fewer than two of those there is nothing to compare
and the group is not kept either. Without a key every group is kept, also one that failed as a
whole.
"""

from __future__ import annotations

from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, assert_never

from mega_agentrl.config.choices import FilterKey

if TYPE_CHECKING:
    from mega_agentrl.config.group_schema import GroupConfig
    from mega_agentrl.types.records import RolloutTree, Score

MIN_GOOD = 2


class Verdict(StrEnum):
    """kept, or why not: mean at or below the range, at or above it, too many failed."""

    kept = "kept"
    low = "low"
    high = "high"
    failed = "failed"


def judge(tree: RolloutTree, config: GroupConfig) -> Verdict:
    """Whether a scored tree is trained on."""
    if config.filter_key is FilterKey.none:
        return Verdict.kept
    mean = group_mean(tree, config.filter_key)
    if mean is None:
        return Verdict.failed
    low, high = config.filter_range
    if mean <= low:
        return Verdict.low
    return Verdict.high if mean >= high else Verdict.kept


def group_mean(tree: RolloutTree, key: FilterKey) -> float | None:
    """Mean over the trajectories that did not fail; None with fewer than `MIN_GOOD` of them."""
    scores = [one.score for one in tree.trajectories if not one.failed and one.score is not None]
    if len(scores) < MIN_GOOD:
        return None
    return fmean(_value(score, key) for score in scores)


def _value(score: Score, key: FilterKey) -> float:
    match key:
        case FilterKey.accuracy:
            return float(score.correct)
        case FilterKey.reward:
            return score.value
        case FilterKey.none:
            raise ValueError("rollout.filter_key=none has no value to filter by")
        case _:
            assert_never(key)

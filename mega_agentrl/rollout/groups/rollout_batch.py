"""The result of collecting one step: trees to train on, all finished trees, and counts.

Scores may still be missing; metrics about them are correct once `pending_scores` are resolved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.rollout.groups.filter import FilterResult

if TYPE_CHECKING:
    from mega_agentrl.rollout.groups.scoring import PendingScore
    from mega_agentrl.types.records import Prompt, RolloutTree


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutBatch:
    """The groups of a step, in the order of their prompts."""

    trees: Sequence[RolloutTree]
    """Trees to train on."""
    finished_trees: Sequence[RolloutTree]
    """`trees` and the filtered ones; the basis of statistics of the policy."""
    filter_results: Sequence[FilterResult]
    """Filter result of each finished tree."""
    version: int
    """Weight version that the engine served when the batch was complete."""
    group_counts: Mapping[str, int]
    """Numbers of groups by metric name, without the prefix ``rollout/``."""
    pending_scores: Sequence[PendingScore] = ()
    """Scores of finished trees that are still being computed."""
    consumed_prompts: Sequence[Prompt] = ()
    """Prompts of the finished trees and of dropped stragglers."""

    def __post_init__(self) -> None:
        if len(self.finished_trees) != len(self.filter_results):
            raise ValueError(
                f"RolloutBatch: got {len(self.filter_results)} filter results, expected one for "
                f"each of the {len(self.finished_trees)} finished trees"
            )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the groups, named ``rollout/...``.

        `success_unfiltered` and `reward_unfiltered` are means over all finished trajectories,
        before the filter. `stale_tokens_fraction` is the share of sampled tokens to train on that
        are older than `version`; `staleness_mean` and `staleness_max` are their lags in versions.
        """
        counts = Counter(self.filter_results)
        trajectories = [one for tree in self.finished_trees for one in tree.trajectories]
        scores = [one.score for one in trajectories if not one.failed and one.score is not None]
        values: dict[str, float] = {
            **self.group_counts,
            "num_groups_kept": len(self.trees),
            "num_groups_filtered_low": counts[FilterResult.below_range],
            "num_groups_filtered_high": counts[FilterResult.above_range],
            "num_groups_failed": counts[FilterResult.too_few_valid],
            "success_unfiltered": sum(score.correct for score in scores) / max(1, len(scores)),
            "reward_unfiltered": sum(score.value for score in scores) / max(1, len(scores)),
            **self._staleness_metrics(),
        }
        return {f"rollout/{name}": float(value) for name, value in values.items()}

    def _staleness_metrics(self) -> dict[str, float]:
        lags = [
            self.version - version
            for tree in self.trees
            for one in tree.trajectories
            for version, sampled in zip(one.versions, one.loss_mask, strict=True)
            if sampled
        ]
        return {
            "stale_tokens_fraction": sum(lag > 0 for lag in lags) / max(1, len(lags)),
            "staleness_mean": sum(lags) / max(1, len(lags)),
            "staleness_max": max(lags, default=0),
        }

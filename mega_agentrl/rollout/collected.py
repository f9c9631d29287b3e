"""What one step's collecting gave: the trees to train on, all that finished, and the counts.

Scores may be missing yet: numbers about them are right when `pending` is settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.rollout.filter import Verdict

if TYPE_CHECKING:
    from mega_agentrl.rollout.scoring import PendingScore
    from mega_agentrl.types.records import Prompt, RolloutTree


@dataclass(slots=True, kw_only=True, frozen=True)
class Collected:
    """The groups of a step, in the order of their prompts.

    trees: those to train on. seen: these and the ones that were filtered: what statistics of the
    policy are made of. verdicts: one for each of `seen`. version: of the weights served now.
    counts: numbers of groups by metric name. pending: the scores of `seen` that others work on.
    used: the prompts that are done with, those of `seen` and of dropped stragglers.
    """

    trees: Sequence[RolloutTree]
    seen: Sequence[RolloutTree]
    verdicts: Sequence[Verdict]
    version: int
    counts: Mapping[str, int]
    pending: Sequence[PendingScore] = ()
    used: Sequence[Prompt] = ()

    def __post_init__(self) -> None:
        if len(self.seen) != len(self.verdicts):
            raise ValueError(
                f"Collected: got {len(self.verdicts)} verdicts, expected one for each of the "
                f"{len(self.seen)} trees that were seen"
            )

    def metrics(self) -> dict[str, float]:
        """Named ``rollout/what``: how groups fared.

        `success_seen`, `reward_seen`: means over all finished trajectories, before any filter.
        `stale_tokens`: share of the sampled tokens to train on that older weights gave.
        `staleness_mean`, `staleness_max`: by how many versions they were older.
        """
        number = Counter(self.verdicts)
        trajectories = [one for tree in self.seen for one in tree.trajectories]
        scores = [one.score for one in trajectories if not one.failed and one.score is not None]
        values: dict[str, float] = {
            **self.counts,
            "groups_kept": len(self.trees),
            "groups_filtered_low": number[Verdict.low],
            "groups_filtered_high": number[Verdict.high],
            "groups_failed": number[Verdict.failed],
            "success_seen": sum(score.correct for score in scores) / max(1, len(scores)),
            "reward_seen": sum(score.value for score in scores) / max(1, len(scores)),
            **self._staleness(),
        }
        return {f"rollout/{name}": float(value) for name, value in values.items()}

    def _staleness(self) -> dict[str, float]:
        ages = [
            self.version - version
            for tree in self.trees
            for one in tree.trajectories
            for version, sampled in zip(one.versions, one.loss_mask, strict=True)
            if sampled
        ]
        return {
            "stale_tokens": sum(age > 0 for age in ages) / max(1, len(ages)),
            "staleness_mean": sum(ages) / max(1, len(ages)),
            "staleness_max": max(ages, default=0),
        }

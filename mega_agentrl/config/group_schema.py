"""Settings of the groups (`rollout.*`): which are trained on, how long a step waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from mega_agentrl.config.choices import FilterKey
from mega_agentrl.config.ranges import require


@dataclass
class GroupConfig:
    """Which groups (all trajectories of one prompt) a step takes; see `rollout.groups`.

    filter_key: a group is kept where the mean of this number is inside of filter_range, its ends
    left out, else another prompt takes its place.
    oversample: prompts started in a step beyond data.prompts_per_step.
    quorum, straggler_s: once that share of data.prompts_per_step is kept, the unfinished groups
    have that many seconds; 0 is no limit. carry_over: what is unfinished then, or is more than
    the step needs, goes on in the next step with its weights, instead of being dropped.
    staleness: how many updates rollouts may be ahead of the step that learns. 0: synchronous. 1:
    one step off, a step learns while the next one is collected. More: rollouts go on while weights
    are sent. A token that is trained on is at most so many versions old; see `algo.correction`.
    """

    filter_key: FilterKey = FilterKey.none
    filter_range: list[float] = field(default_factory=lambda: [0.01, 0.99])
    oversample: int = 0
    quorum: float = 1.0
    straggler_s: float = 0.0
    carry_over: bool = False
    staleness: int = 0

    def __post_init__(self) -> None:
        require(isfinite(self.straggler_s), "rollout.straggler_s", self.straggler_s, "finite")
        ends = self.filter_range
        require(
            len(ends) == 2 and all(map(isfinite, ends)) and ends[0] < ends[1],
            "rollout.filter_range",
            ends,
            "two finite numbers, the lower one first",
        )
        for key in ("oversample", "straggler_s", "staleness"):
            require(getattr(self, key) >= 0, f"rollout.{key}", getattr(self, key), "at least 0")
        require(0 < self.quorum <= 1, "rollout.quorum", self.quorum, "in (0, 1]")
        require(
            self.quorum == 1 or self.straggler_s > 0,
            "rollout.straggler_s",
            self.straggler_s,
            f"more than 0 with rollout.quorum={self.quorum}, which changes nothing without a limit",
        )

"""Settings of groups (`rollout.*`): filtering, oversampling, stragglers and staleness."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from mega_agentrl.config.enums import FilterMetric
from mega_agentrl.config.sections.ranges import check_range


@dataclass
class GroupConfig:
    """Selection of the groups (all trajectories of a prompt) of a step, and the wait for them."""

    filter_metric: FilterMetric = FilterMetric.none
    """Metric by whose group mean groups are filtered; filtered groups are replaced by other
    prompts."""
    filter_range: list[float] = field(default_factory=lambda: [0.01, 0.99])
    """Open interval of the group mean within which a group is kept."""
    num_oversampled_prompts: int = 0
    """Prompts started in a step beyond `data.prompts_per_step`."""
    min_finished_fraction: float = 1.0
    """Fraction of `data.prompts_per_step` that starts the straggler timeout once it is kept."""
    straggler_timeout_s: float = 0.0
    """Time that the unfinished groups then have; 0 is no limit."""
    partial_rollout: bool = False
    """Continue unfinished or surplus groups in the next step, with its weights, instead of dropping
    them."""
    max_staleness: int = 0
    """Maximum number of updates that rollouts may be ahead of the training step, and by which a
    trained token may be old. 0 is synchronous; 1 trains on a step while the next is sampled; above
    1 sampling also continues while weights are sent. See `algo.rollout_correction`."""

    def __post_init__(self) -> None:
        check_range(
            isfinite(self.straggler_timeout_s),
            "rollout.straggler_timeout_s",
            self.straggler_timeout_s,
            "finite",
        )
        ends = self.filter_range
        check_range(
            len(ends) == 2 and all(map(isfinite, ends)) and ends[0] < ends[1],
            "rollout.filter_range",
            ends,
            "two finite numbers, the lower one first",
        )
        for key in ("num_oversampled_prompts", "straggler_timeout_s", "max_staleness"):
            check_range(getattr(self, key) >= 0, f"rollout.{key}", getattr(self, key), "at least 0")
        check_range(
            0 < self.min_finished_fraction <= 1,
            "rollout.min_finished_fraction",
            self.min_finished_fraction,
            "in (0, 1]",
        )
        check_range(
            self.min_finished_fraction == 1 or self.straggler_timeout_s > 0,
            "rollout.straggler_timeout_s",
            self.straggler_timeout_s,
            f"more than 0 with rollout.min_finished_fraction={self.min_finished_fraction}, which "
            "has no effect without a timeout",
        )

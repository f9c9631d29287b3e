"""Counts of failed trajectories and the reason of the first one.

A failed trajectory is in no mean over scores and is never trained on, so every table shows beside
a mean the number of trajectories that it covers. A suspect one is scored, because the policy may
have caused its end, but if most are, the agent or a tool is broken or too slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.types.records import StopReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.types.records import RolloutTree, Trajectory

SUSPECT_STOP_REASONS = (StopReason.agent_crash, StopReason.time_limit)
"""Ends that are scored, and that an agent or tool with an error would bring about, too."""

MAX_REASON_CHARS = 500
"""Longer reasons are cut; the log of the driver has them whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCounts:
    """Numbers of trajectories of a pass, or of several."""

    num_trajectories: int = 0
    num_failed: int = 0
    """Trajectories without a usable end or without a reward."""
    num_abstained: int = 0
    """Trajectories that the reward functions gave no score on purpose; they did not fail."""
    num_aborted: int = 0
    """Failed trajectories that an engine aborted, which never stop the run."""
    num_suspect: int = 0
    """Trajectories with a score whose end may be the fault of an agent or a tool."""
    first_reason: str = ""
    """Why the first of them failed, on one line; empty if none did."""
    first_suspect: str = ""
    """How the first suspect one ended, on one line; empty if there is none."""

    def __add__(self, other: FailureCounts) -> FailureCounts:
        """Return the counts of both, with the earlier reason."""
        return FailureCounts(
            num_trajectories=self.num_trajectories + other.num_trajectories,
            num_failed=self.num_failed + other.num_failed,
            num_abstained=self.num_abstained + other.num_abstained,
            num_aborted=self.num_aborted + other.num_aborted,
            num_suspect=self.num_suspect + other.num_suspect,
            first_reason=self.first_reason or other.first_reason,
            first_suspect=self.first_suspect or other.first_suspect,
        )

    @property
    def num_scored(self) -> int:
        """Trajectories that have a score and did not fail."""
        return self.num_trajectories - self.num_failed - self.num_abstained

    @property
    def failed_fraction(self) -> float:
        """Share of failed trajectories; 0 without any trajectory."""
        return self.num_failed / self.num_trajectories if self.num_trajectories else 0.0

    def exceeds(self, bound: float) -> bool:
        """Return whether a larger share failed, or is suspect, than `bound`.

        Engine aborts are left out.
        """
        num_counted = self.num_failed - self.num_aborted + self.num_suspect
        return num_counted > bound * self.num_trajectories

    def describe(self) -> str:
        """Return the counts and the reason on one line; empty if none failed."""
        if not self.num_failed:
            return ""
        counts = f"{self.num_failed} of {self.num_trajectories} trajectories failed"
        return f"{counts}; the first: {self.first_reason}"


def count_failures(trees: Iterable[RolloutTree]) -> FailureCounts:
    """Return the counts of all trajectories of the trees, greedy ones left out."""
    trajectories = [trajectory for tree in trees for trajectory in tree.trajectories]
    abstained = [trajectory for trajectory in trajectories if trajectory.reward_abstained]
    failed = [item for item in trajectories if item.failed and not item.reward_abstained]
    # A failure that the user can fix comes before an abort by an engine.
    fixable = [item for item in failed if item.stop_reason is not StopReason.aborted]
    first = next(iter(fixable or failed), None)
    reason = "" if first is None else " ".join(first.failure_reason.split())
    suspect = [
        item
        for item in trajectories
        if item.stop_reason in SUSPECT_STOP_REASONS and item.score is not None
    ]
    return FailureCounts(
        num_trajectories=len(trajectories),
        num_failed=len(failed),
        num_abstained=len(abstained),
        num_aborted=len(failed) - len(fixable),
        num_suspect=len(suspect),
        first_reason=reason[:MAX_REASON_CHARS],
        first_suspect=_describe_end(suspect[0])[:MAX_REASON_CHARS] if suspect else "",
    )


def _describe_end(trajectory: Trajectory) -> str:
    """Return on one line how a trajectory ended, with the last outcome that is recorded."""
    outcomes = (turn.outcome for turn in reversed(trajectory.turns) if turn.outcome is not None)
    last = next((f": {outcome.tool}: {outcome.answer}" for outcome in outcomes), "")
    return " ".join(f"{trajectory.stop_reason.value}{last}".split())

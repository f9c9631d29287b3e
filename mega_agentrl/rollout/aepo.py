"""`rollout.branching=aepo`: AEPO's branching in the asynchronous tree (arXiv 2510.14545).

Two things set it apart from `after_result`, whose probe and baseline it shares.

**How many roots.** Entropy at the question (H_root, the baseline) against that over the tool
steps (H_tool) says how the M trajectories are split: `algo.aepo.initial_rollouts`. To know them
one root runs first, without forks; the others start when it has ended. It is one of the M and
one of the N, so nothing is sampled in vain, and the tree still does not depend on timing. A
trajectory that has ended cannot fork: where N is 1, one more root starts, to hold the slots.
H_tool is the mean over the monitored root's turns after a tool's answer, each read like a
probe. Without such turns, after a failure, or with `initial_rollouts` set, N is what the
configuration says; when it is set no root runs ahead.

**No branches in long rows.** P = (alpha + beta * dH) * max(0, 1 - penalty * l) > tau, with l the
decisions in a row, on the way from the root to here, that forked. Forks inherit it. (The
published code counts per prompt and round instead, which a tree without rounds does not have.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from mega_agentrl.algo.aepo import branch_penalty, initial_rollouts
from mega_agentrl.rollout.branching import (
    AfterResult,
    ForkPoint,
    configured_roots,
    probe_mean,
    split_evenly,
)
from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from mega_agentrl.types.records import Trajectory


@dataclass(slots=True, frozen=True)
class Aepo(AfterResult):
    """`BranchPolicy` of the module's docstring."""

    def monitors(self, num_trajectories: int) -> bool:
        """See `BranchPolicy`."""
        return self.config.initial_rollouts is None and num_trajectories > 1

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """See `BranchPolicy`."""
        if monitored is None:
            return AfterResult.fork_slots(self, num_trajectories)
        h_root, h_tool = monitored.baseline_entropy, self._tool_entropy(monitored)
        if h_root is None or h_tool is None or monitored.failed:
            num_roots = configured_roots(self.config, num_trajectories)
        else:
            num_roots = initial_rollouts(num_trajectories, h_root, h_tool)
        more = max(1, num_roots - 1)
        return split_evenly(num_trajectories - 1 - more, more)

    def probability(self, point: ForkPoint) -> float | None:
        """See `BranchPolicy`."""
        p = AfterResult.probability(self, point)
        return None if p is None else p * branch_penalty(point.streak, rate=self.config.penalty)

    def _tool_entropy(self, trajectory: Trajectory) -> float | None:
        """Mean over the turns that follow a tool's answer; None where no such turn is."""
        means = [
            probe_mean(self.config, trajectory.entropies[turn.start : turn.stop])
            for before, turn in pairwise(trajectory.turns)
            if before.author is Author.tool and turn.author is Author.assistant
        ]
        known = [mean for mean in means if mean is not None]
        return fmean(known) if known else None

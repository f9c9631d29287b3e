"""AEPO's branch policy in the asynchronous tree (`rollout.branching=aepo`; arXiv 2510.14545).

It differs from `ArpoBranching`, whose probe and baseline it shares, in two points.

**Number of roots.** The entropy at the question (H_root, the baseline) and the mean entropy over
the tool steps (H_tool) determine how the M trajectories are split into N roots and M - N forks:
`algo.aepo.initial_rollouts`. To measure both, one root runs first, without forks, and the others
start when it has ended. This monitored root is one of the N roots, so no sample is wasted and the
tree does not depend on timing. Since a trajectory that has ended cannot fork, one more root
starts if N is 1, to use the slots. H_tool is the mean over the monitored root's turns after a tool
answer, each measured like a probe. If there is no such turn or the root fails, N is the configured
number. No root is monitored if `rollout.branch.initial_rollouts` is set.

**Penalty on consecutive forks.** P = (alpha + beta * dH) * max(0, 1 - penalty * l) > tau, where l
is the number of most recent consecutive decisions on the path from the root that forked. Forks
inherit l. (The released code counts per prompt and round, which a tree without rounds lacks.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from mega_agentrl.algo.aepo import branch_penalty, initial_rollouts
from mega_agentrl.rollout.branching.policy import (
    ArpoBranching,
    ForkPoint,
    mean_probe_entropy,
    num_configured_roots,
    split_evenly,
)
from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from mega_agentrl.types.records import Trajectory


@dataclass(slots=True, frozen=True)
class AepoBranching(ArpoBranching):
    """AEPO's branch policy; see the module docstring."""

    def needs_monitor_root(self, num_trajectories: int) -> bool:
        """Return whether the number of roots has to be measured with a first root."""
        return self.config.initial_rollouts is None and num_trajectories > 1

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return the fork slots of each root; `monitored` is the first root, once it has ended."""
        if monitored is None:
            return ArpoBranching.fork_slots(self, num_trajectories)
        h_root, h_tool = monitored.baseline_entropy, self._tool_entropy(monitored)
        if h_root is None or h_tool is None or monitored.failed:
            num_roots = num_configured_roots(self.config, num_trajectories)
        else:
            num_roots = initial_rollouts(num_trajectories, h_root, h_tool)
        more = max(1, num_roots - 1)
        return split_evenly(num_trajectories - 1 - more, more)

    def probability(self, point: ForkPoint) -> float | None:
        """Return the penalized P, or None with too few probed tokens."""
        p = ArpoBranching.probability(self, point)
        return (
            None
            if p is None
            else p
            * branch_penalty(point.num_consecutive_forks, rate=self.config.consecutive_penalty)
        )

    def _tool_entropy(self, trajectory: Trajectory) -> float | None:
        """Return the mean probe entropy over turns after a tool answer, None without them."""
        means = [
            mean_probe_entropy(self.config, trajectory.entropies[turn.start : turn.stop])
            for before, turn in pairwise(trajectory.turns)
            if before.role is Role.tool and turn.role is Role.assistant
        ]
        known = [mean for mean in means if mean is not None]
        return fmean(known) if known else None

"""A branching rule in one file (`rollout.branching=examples/my_branching.py`).

See docs/own_algorithm.md.
"""

from mega_agentrl.rollout.branching.policy import BranchPolicy, ForkPoint


class Branching(BranchPolicy):
    """Fork with all slots where one probed token is `rollout.branch.tau` nats above the root."""

    def num_forks(self, point: ForkPoint) -> int:
        """Return how many forks to make after a tool's answer."""
        rise = max(point.probe_entropies, default=0.0) - point.baseline
        return point.num_slots if rise > self.config.tau else 0

"""Settings of the branching (`rollout.branch.*`): the laws' constants and the fork budget."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from mega_agentrl.config.choices import Budget
from mega_agentrl.config.ranges import require


@dataclass
class BranchConfig:
    """When a trajectory forks, and how often.

    alpha, beta, tau: fork when alpha + beta * (H - H_root) > tau (arXiv 2507.19849);
    `rollout.branching=aepo` lowers the left side by the share `penalty` for every fork in a row,
    and `released` compares it with a random number instead of tau.
    probe_tokens: tokens after a tool's answer whose mean entropy (nats) is H.
    initial_rollouts: N roots per prompt; null means half of rollout.num_trajectories, and with
    aepo what a first, monitored root suggests.
    forks_per_decision: Z extra paths per decision (the released code's beam_size - 1).
    budget: how the fork slots of a prompt are shared out; released has its own way.
    estimate_top_k: K > 0 also estimates each entropy from the K most probable tokens, as the
    released code does, and reports the distance to the exact one; at temperature 1.
    """

    alpha: float = 0.5
    beta: float = 0.2
    tau: float = 0.5
    penalty: float = 0.05
    probe_tokens: int = 20
    initial_rollouts: int | None = None
    forks_per_decision: int = 1
    budget: Budget = Budget.partitioned
    estimate_top_k: int = 0

    def __post_init__(self) -> None:
        for key in ("alpha", "beta", "tau"):
            value = getattr(self, key)
            require(isfinite(value), f"rollout.branch.{key}", value, "a finite number")
        share = self.penalty
        require(0 <= share <= 1, "rollout.branch.penalty", share, "between 0 and 1")
        require(
            0 <= self.estimate_top_k <= 20,  # what vLLM lists at most
            "rollout.branch.estimate_top_k",
            self.estimate_top_k,
            "between 0 (off) and 20",
        )
        num_probed = self.probe_tokens
        require(num_probed >= 1, "rollout.branch.probe_tokens", num_probed, "at least 1")
        roots = self.initial_rollouts
        require(
            roots is None or roots >= 1,
            "rollout.branch.initial_rollouts",
            roots,
            "null, or at least 1",
        )
        require(
            self.forks_per_decision >= 0,
            "rollout.branch.forks_per_decision",
            self.forks_per_decision,
            "at least 0 (which never forks)",
        )

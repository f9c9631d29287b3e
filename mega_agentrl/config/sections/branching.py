"""Settings of branching (`rollout.branch.*`): parameters of the rules and the fork budget."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from mega_agentrl.config.enums import ForkBudgetMode
from mega_agentrl.config.sections.ranges import check_range


@dataclass
class BranchConfig:
    """Conditions under which a trajectory forks, and the number of forks.

    A trajectory forks when alpha + beta * (H - H_root) > tau (arXiv 2507.19849), where H is the
    mean entropy of the probe after a tool's answer. `rollout.branching=released` compares the left
    side with a random number instead of tau.
    """

    alpha: float = 0.5
    """Base of the branching probability."""
    beta: float = 0.2
    """Weight of the entropy change."""
    tau: float = 0.5
    """Threshold of the branching probability."""
    consecutive_penalty: float = 0.05
    """Fraction by which `rollout.branching=aepo` lowers the probability for every consecutive
    fork."""
    num_probe_tokens: int = 20
    """Tokens sampled after a tool's answer whose mean entropy in nats is H."""
    initial_rollouts: int | None = None
    """Roots per prompt, N in ARPO; null is half of `rollout.group_size`, or, with aepo, a number
    computed from a first monitored root."""
    num_forks_per_decision: int = 1
    """Forks per decision, Z in ARPO (beam_size - 1 in the released code)."""
    fork_budget: ForkBudgetMode = ForkBudgetMode.partitioned
    """Distribution of a prompt's forks over its paths; `released` has its own rule."""
    entropy_estimate_top_k: int = 0
    """Above 0, also estimate each entropy from the K most probable tokens, as the released code
    does, and report the error. Needs temperature 1."""

    def __post_init__(self) -> None:
        for key in ("alpha", "beta", "tau"):
            value = getattr(self, key)
            check_range(isfinite(value), f"rollout.branch.{key}", value, "a finite number")
        penalty = self.consecutive_penalty
        check_range(
            0 <= penalty <= 1, "rollout.branch.consecutive_penalty", penalty, "between 0 and 1"
        )
        check_range(
            0 <= self.entropy_estimate_top_k <= 20,  # vLLM's limit
            "rollout.branch.entropy_estimate_top_k",
            self.entropy_estimate_top_k,
            "between 0 (off) and 20",
        )
        num_tokens = self.num_probe_tokens
        check_range(num_tokens >= 1, "rollout.branch.num_probe_tokens", num_tokens, "at least 1")
        roots = self.initial_rollouts
        check_range(
            roots is None or roots >= 1,
            "rollout.branch.initial_rollouts",
            roots,
            "null, or at least 1",
        )
        check_range(
            self.num_forks_per_decision >= 0,
            "rollout.branch.num_forks_per_decision",
            self.num_forks_per_decision,
            "at least 0 (which never forks)",
        )

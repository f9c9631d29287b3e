"""Branch policies: where a trajectory forks, and how a prompt's budget is shared out.

A prompt gets M trajectories. A policy starts N roots and gives each some fork slots; a path
that forks pays one slot per fork and splits what is left evenly over itself and its forks,
in path order. So who may fork depends on the tree alone, never on timing. Slots nobody used
become fresh roots at the end (see `tree`).

`after_result` is ARPO's law (arXiv 2507.19849): entropy is read over the first k tokens after
a tool's answer. This module only decides; probing and forking are the trajectory's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol, assert_never

from mega_agentrl.algo.branching import branch_probability, should_branch
from mega_agentrl.config.choices import Branching
from mega_agentrl.config.schema import BranchConfig, RolloutConfig


@dataclass(slots=True, kw_only=True, frozen=True)
class ForkPoint:
    """A place where a trajectory could fork: right after a tool's answer.

    slots: forks the path may still make. baseline: mean entropy at the root, nats.
    probe_entropies: exact entropies of the tokens sampled after the answer, nats.
    """

    path: tuple[int, ...]
    slots: int
    baseline: float
    probe_entropies: Sequence[float]


class BranchPolicy(Protocol):
    """Decides about forks; has no state that depends on the order of calls."""

    @property
    def probe_tokens(self) -> int:
        """Tokens to sample after a tool's answer before asking; 0: never ask."""

    def fork_slots(self, num_trajectories: int) -> tuple[int, ...]:
        """Fork slots of each root; as many roots as there are entries."""

    def baseline(self, entropies: Sequence[float]) -> float | None:
        """Baseline from the entropies of a root's first turn; None: it never forks."""

    def num_forks(self, point: ForkPoint) -> int:
        """How many siblings to fork here, at most `point.slots`."""


@dataclass(slots=True, frozen=True)
class NoBranching:
    """Independent trajectories: plain sampling."""

    @property
    def probe_tokens(self) -> int:
        """See `BranchPolicy`."""
        return 0

    def fork_slots(self, num_trajectories: int) -> tuple[int, ...]:
        """See `BranchPolicy`."""
        return (0,) * num_trajectories

    def baseline(self, entropies: Sequence[float]) -> float | None:
        """See `BranchPolicy`."""
        del entropies
        return None

    def num_forks(self, point: ForkPoint) -> int:
        """See `BranchPolicy`."""
        del point
        return 0


@dataclass(slots=True, frozen=True)
class AfterResult:
    """The paper's law: fork when alpha + beta * (H - baseline) > tau, H over the probe."""

    config: BranchConfig

    @property
    def probe_tokens(self) -> int:
        """See `BranchPolicy`."""
        return self.config.probe_tokens

    def fork_slots(self, num_trajectories: int) -> tuple[int, ...]:
        """N roots (half of M where the configuration is silent), M - N slots."""
        asked = self.config.initial_rollouts
        num_roots = max(1, num_trajectories // 2) if asked is None else asked
        if not 1 <= num_roots <= num_trajectories:
            raise ValueError(
                f"rollout.branch.initial_rollouts={num_roots}: expected between 1 and "
                f"rollout.num_trajectories={num_trajectories}"
            )
        return split_evenly(num_trajectories - num_roots, num_roots)

    def baseline(self, entropies: Sequence[float]) -> float | None:
        """See `BranchPolicy`."""
        return self._mean(entropies)

    def num_forks(self, point: ForkPoint) -> int:
        """See `BranchPolicy`."""
        entropy = self._mean(point.probe_entropies)
        if entropy is None:
            return 0
        config = self.config
        p = branch_probability(entropy - point.baseline, alpha=config.alpha, beta=config.beta)
        return min(config.forks_per_decision, point.slots) * should_branch(p, tau=config.tau)

    def _mean(self, entropies: Sequence[float]) -> float | None:
        """Mean over the first k tokens; None with fewer than `min_probe_tokens`."""
        if len(entropies) < self.config.min_probe_tokens:
            return None
        return fmean(entropies[: self.config.probe_tokens])


def make_policy(config: RolloutConfig) -> BranchPolicy:
    """The policy the configuration names."""
    match config.branching:
        case Branching.none:
            return NoBranching()
        case Branching.after_result:
            return AfterResult(config.branch)
        case _:
            assert_never(config.branching)


def split_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """`total` as `num_parts` whole numbers, the remainder to the first ones."""
    each, rest = divmod(total, num_parts)
    return tuple(each + (index < rest) for index in range(num_parts))

"""Branch policies: where a trajectory forks, and how a prompt's budget is shared out.

A prompt gets M trajectories. A policy starts N roots and gives each some fork slots; a path
that forks pays one slot per fork and splits what is left evenly over itself and its forks,
in path order. So who may fork depends on the tree alone, never on timing (`Share`; a `Pool`
for comparison does depend on it). Slots nobody used become fresh roots at the end (see `tree`).

`after_result` is ARPO's law (arXiv 2507.19849): entropy is read over the first k tokens after
a tool's answer. AEPO's is in `aepo`; `released` goes in lock-step rounds and is no policy, see
`released`. This module only decides; probing and forking are the trajectory's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from mega_agentrl.algo.branching import branch_probability, should_branch
from mega_agentrl.config.choices import Budget

if TYPE_CHECKING:
    from mega_agentrl.config.branch_schema import BranchConfig
    from mega_agentrl.types.records import Trajectory

MIN_PROBE_TOKENS = 5
"""A turn that ends before these decides nothing: the mean of fewer entropies is noise."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ForkPoint:
    """A place where a trajectory could fork: right after a tool's answer.

    slots: forks the path may still make. baseline: mean entropy at the root, nats.
    probe_entropies: exact entropies of the tokens sampled after the answer, nats.
    streak: decisions in a row before this one, on the way from the root, that forked.
    """

    path: tuple[int, ...]
    slots: int
    baseline: float
    probe_entropies: Sequence[float]
    streak: int = 0


class ForkBudget(Protocol):
    """The fork slots that a path may use."""

    @property
    def left(self) -> int:
        """Forks the path may still make."""

    def pay(self, num_forks: int) -> Sequence[ForkBudget]:
        """Pay for forks, at most `left`; the budgets of these forks."""


@dataclass(slots=True)
class Share:
    """Slots of one path alone; what is left after a fork is split evenly, in path order."""

    left: int

    def pay(self, num_forks: int) -> Sequence[Share]:
        """See `ForkBudget`; the remainder goes to the path itself and the first forks."""
        self.left, *others = split_evenly(self.left - num_forks, num_forks + 1)
        return [Share(slots) for slots in others]


@dataclass(slots=True)
class Pool:
    """Slots of all paths of a prompt: who asks first gets them, so the tree depends on timing."""

    left: int

    def pay(self, num_forks: int) -> Sequence[Pool]:
        """See `ForkBudget`."""
        self.left -= num_forks
        return [self] * num_forks


class BranchPolicy(Protocol):
    """Decides about forks; has no state that depends on the order of calls."""

    @property
    def probe_tokens(self) -> int:
        """Tokens to sample after a tool's answer before asking; 0: never ask."""

    @property
    def threshold(self) -> float | None:
        """What `probability` must exceed for a fork; None where there is no law."""

    def monitors(self, num_trajectories: int) -> bool:
        """Whether a first root must have ended, without a fork, before `fork_slots` can tell."""

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Fork slots of each root that is still to start; as many roots as there are entries.

        num_trajectories: M, the monitored root included. Slots, roots and it add up to M.
        """

    def baseline(self, entropies: Sequence[float]) -> float | None:
        """Baseline from the entropies of a root's first turn; None: it never forks."""

    def probability(self, point: ForkPoint) -> float | None:
        """The law's P, not clamped; None with too few tokens to tell, or without a law."""

    def num_forks(self, point: ForkPoint) -> int:
        """How many siblings to fork here, at most `point.slots`."""


@dataclass(slots=True, frozen=True)
class NoBranching:
    """Independent trajectories: plain sampling."""

    @property
    def probe_tokens(self) -> int:
        """See `BranchPolicy`."""
        return 0

    @property
    def threshold(self) -> float | None:
        """See `BranchPolicy`."""
        return None

    def monitors(self, num_trajectories: int) -> bool:
        """See `BranchPolicy`."""
        del num_trajectories
        return False

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """See `BranchPolicy`."""
        del monitored
        return (0,) * num_trajectories

    def baseline(self, entropies: Sequence[float]) -> float | None:
        """See `BranchPolicy`."""
        del entropies
        return None

    def probability(self, point: ForkPoint) -> float | None:
        """See `BranchPolicy`."""
        del point
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

    @property
    def threshold(self) -> float | None:
        """See `BranchPolicy`."""
        return self.config.tau

    def monitors(self, num_trajectories: int) -> bool:
        """See `BranchPolicy`."""
        del num_trajectories
        return False

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """N roots (half of M where the configuration is silent), M - N slots."""
        del monitored
        num_roots = configured_roots(self.config, num_trajectories)
        return split_evenly(num_trajectories - num_roots, num_roots)

    def baseline(self, entropies: Sequence[float]) -> float | None:
        """See `BranchPolicy`."""
        return probe_mean(self.config, entropies)

    def probability(self, point: ForkPoint) -> float | None:
        """See `BranchPolicy`."""
        entropy = probe_mean(self.config, point.probe_entropies)
        if entropy is None:
            return None
        config = self.config
        return branch_probability(entropy - point.baseline, alpha=config.alpha, beta=config.beta)

    def num_forks(self, point: ForkPoint) -> int:
        """See `BranchPolicy`."""
        p = self.probability(point)
        if p is None:
            return 0
        forks = min(self.config.forks_per_decision, point.slots)
        return forks * should_branch(p, tau=self.config.tau)


def probe_mean(config: BranchConfig, entropies: Sequence[float]) -> float | None:
    """Mean over the first k tokens; None with fewer than `MIN_PROBE_TOKENS`, or than k."""
    if len(entropies) < min(MIN_PROBE_TOKENS, config.probe_tokens):
        return None
    return fmean(entropies[: config.probe_tokens])


def configured_roots(config: BranchConfig, num_trajectories: int) -> int:
    """N, half of M where the configuration is silent; `ValueError` where it is no 1 to M."""
    asked = config.initial_rollouts
    num_roots = max(1, num_trajectories // 2) if asked is None else asked
    if not 1 <= num_roots <= num_trajectories:
        raise ValueError(
            f"rollout.branch.initial_rollouts={num_roots}: expected between 1 and "
            f"rollout.num_trajectories={num_trajectories}"
        )
    return num_roots


def root_budgets(rule: Budget, slots: Sequence[int]) -> Sequence[ForkBudget]:
    """A budget per root with `slots` of its own, or a common one of all of them."""
    if rule is Budget.first_come:
        return [Pool(sum(slots))] * len(slots)
    return [Share(count) for count in slots]


def split_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """`total` as `num_parts` whole numbers, the remainder to the first ones."""
    each, rest = divmod(total, num_parts)
    return tuple(each + (index < rest) for index in range(num_parts))

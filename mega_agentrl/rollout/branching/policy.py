"""Branch policies: where a trajectory forks, and how the fork budget of a prompt is divided.

A prompt gets M trajectories. A policy starts N roots and gives each a number of fork slots. A path
that forks pays one slot per fork and splits the rest evenly over itself and its forks, in path
order. Which paths may fork therefore depends on the tree alone and not on timing (`PathBudget`; the
`SharedBudget`, meant for comparison, does depend on timing). Unused slots become additional roots
at the end (see `rollout.tree`).

`ArpoBranching` (`after_result`) measures the entropy of the first k tokens after a tool answer
(arXiv 2507.19849); `aepo` extends it. `rollout.branching=released` runs in lock-step without a
policy (see `lockstep_arpo`). Policies only decide; the trajectory probes and forks.

To add a policy: add a choice to `config.enums.Branching`, write the class, and return it from
`branching.registry.make_branch_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from mega_agentrl.algo.branching import branch_probability, should_branch
from mega_agentrl.config.enums import ForkBudgetMode

if TYPE_CHECKING:
    from mega_agentrl.config.sections.branching import BranchConfig
    from mega_agentrl.types.records import Trajectory

MIN_PROBE_TOKENS = 5
"""Shorter turns never fork: the mean over fewer entropies is noise."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ForkPoint:
    """A position where a trajectory may fork: right after a tool answer."""

    path: tuple[int, ...]
    num_slots: int
    """Forks the path may still make."""
    baseline: float
    """Mean entropy at the root, nats."""
    probe_entropies: Sequence[float]
    """Exact entropies of the tokens sampled after the answer, nats."""
    num_consecutive_forks: int = 0
    """Most recent consecutive decisions on the path from the root that forked."""


class ForkBudget(Protocol):
    """The fork slots that a path may use."""

    @property
    def num_left(self) -> int:
        """Number of forks the path may still make."""

    def spend(self, num_forks: int) -> Sequence[ForkBudget]:
        """Pay for at most `num_left` forks and return their budgets."""


@dataclass(slots=True)
class PathBudget:
    """Slots of a single path; after a fork the rest is split evenly, in path order."""

    num_left: int

    def spend(self, num_forks: int) -> Sequence[PathBudget]:
        """Pay for forks; the remainder of the split goes to the path itself and the first forks."""
        self.num_left, *others = split_evenly(self.num_left - num_forks, num_forks + 1)
        return [PathBudget(slots) for slots in others]


@dataclass(slots=True)
class SharedBudget:
    """Slots shared by all paths of a prompt on a first-come basis; the tree depends on timing."""

    num_left: int

    def spend(self, num_forks: int) -> Sequence[SharedBudget]:
        """Pay for forks; each fork shares this budget."""
        self.num_left -= num_forks
        return [self] * num_forks


class BranchPolicy(Protocol):
    """Decides about forks, without state that depends on the order of calls."""

    @property
    def num_probe_tokens(self) -> int:
        """Tokens to sample after a tool answer before asking for forks; 0 never asks."""

    @property
    def threshold(self) -> float | None:
        """Value that `probability` must exceed for a fork; None if there is none."""

    def needs_monitor_root(self, num_trajectories: int) -> bool:
        """Return whether a first root must run to its end, without forks, before `fork_slots`."""

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return the fork slots of each root that is still to start.

        Roots to start, slots and the monitored root add up to `num_trajectories`.

        Args:
            num_trajectories: M, including the monitored root.
            monitored: The first root, if `needs_monitor_root`.
        """

    def baseline_entropy(self, entropies: Sequence[float]) -> float | None:
        """Return the baseline from the entropies of a root's first turn; None disables forks."""

    def probability(self, point: ForkPoint) -> float | None:
        """Return P, not clamped; None with too few probed tokens or if the policy has no P."""

    def num_forks(self, point: ForkPoint) -> int:
        """Return how many forks to make here, at most `point.num_slots`."""


@dataclass(slots=True, frozen=True)
class NoBranching:
    """Never forks: independent trajectories."""

    @property
    def num_probe_tokens(self) -> int:
        """0: forks are never asked for."""
        return 0

    @property
    def threshold(self) -> float | None:
        """None: there is no threshold."""
        return None

    def needs_monitor_root(self, num_trajectories: int) -> bool:
        """Return False."""
        del num_trajectories
        return False

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return M roots without slots."""
        del monitored
        return (0,) * num_trajectories

    def baseline_entropy(self, entropies: Sequence[float]) -> float | None:
        """Return None: nothing forks."""
        del entropies
        return None

    def probability(self, point: ForkPoint) -> float | None:
        """Return None: there is no P."""
        del point
        return None

    def num_forks(self, point: ForkPoint) -> int:
        """Return 0."""
        del point
        return 0


@dataclass(slots=True, frozen=True)
class ArpoBranching:
    """ARPO's rule: fork if alpha + beta * (H - baseline) > tau; H is the probe's mean entropy."""

    config: BranchConfig

    @property
    def num_probe_tokens(self) -> int:
        """`rollout.branch.num_probe_tokens`."""
        return self.config.num_probe_tokens

    @property
    def threshold(self) -> float | None:
        """`rollout.branch.tau`."""
        return self.config.tau

    def needs_monitor_root(self, num_trajectories: int) -> bool:
        """Return False."""
        del num_trajectories
        return False

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return M - N slots, divided over N roots; N defaults to half of M."""
        del monitored
        num_roots = num_configured_roots(self.config, num_trajectories)
        return split_evenly(num_trajectories - num_roots, num_roots)

    def baseline_entropy(self, entropies: Sequence[float]) -> float | None:
        """Return the mean over the first k entropies of a root's first turn."""
        return mean_probe_entropy(self.config, entropies)

    def probability(self, point: ForkPoint) -> float | None:
        """Return P = alpha + beta * (H - baseline); None with too few probed tokens."""
        entropy = mean_probe_entropy(self.config, point.probe_entropies)
        if entropy is None:
            return None
        config = self.config
        return branch_probability(entropy - point.baseline, alpha=config.alpha, beta=config.beta)

    def num_forks(self, point: ForkPoint) -> int:
        """Return `num_forks_per_decision`, as far as there are slots, if P exceeds tau."""
        p = self.probability(point)
        if p is None:
            return 0
        forks = min(self.config.num_forks_per_decision, point.num_slots)
        return forks * should_branch(p, tau=self.config.tau)


def mean_probe_entropy(config: BranchConfig, entropies: Sequence[float]) -> float | None:
    """Return the mean over the first k entropies, or None with too few of them.

    At least min(`MIN_PROBE_TOKENS`, k) entropies are required.
    """
    if len(entropies) < min(MIN_PROBE_TOKENS, config.num_probe_tokens):
        return None
    return fmean(entropies[: config.num_probe_tokens])


def num_configured_roots(config: BranchConfig, num_trajectories: int) -> int:
    """Return N: `rollout.branch.initial_rollouts`, or half of M if that is unset.

    Raises:
        ValueError: N is not between 1 and M.
    """
    configured = config.initial_rollouts
    num_roots = max(1, num_trajectories // 2) if configured is None else configured
    if not 1 <= num_roots <= num_trajectories:
        raise ValueError(
            f"rollout.branch.initial_rollouts={num_roots}: expected between 1 and "
            f"rollout.group_size={num_trajectories}"
        )
    return num_roots


def make_root_budgets(mode: ForkBudgetMode, slots: Sequence[int]) -> Sequence[ForkBudget]:
    """Return a budget per root: its own slots, or one shared budget of all slots."""
    if mode is ForkBudgetMode.first_come:
        return [SharedBudget(sum(slots))] * len(slots)
    return [PathBudget(count) for count in slots]


def split_evenly(total: int, num_parts: int) -> tuple[int, ...]:
    """Split `total` into `num_parts` integers; the first ones get the remainder."""
    each, rest = divmod(total, num_parts)
    return tuple(each + (index < rest) for index in range(num_parts))

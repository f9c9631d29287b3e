"""Branch policies: where trajectories fork, and how the fork budget of a prompt is divided.

A prompt gets M trajectories. A policy starts N roots and gives each a number of fork slots. A path
that forks uses one slot per fork and splits the rest evenly over itself and its forks, in path
order. Which paths may fork therefore depends on the tree alone and not on timing (`PathBudget`; the
`SharedBudget`, meant for comparison, does depend on timing). Unused slots become additional roots
at the end (see `rollout.tree`).

A rule answers two questions: where to ask (`BranchPolicy.asks_at`, by default at every turn after
a tool answer), and how many forks to make there (`BranchPolicy.num_forks`). In between the
trajectory samples a probe of k = `rollout.branch.num_probe_tokens` tokens; 0 never asks. Policies
only decide; the trajectory probes and forks. Alternatively, a rule chooses among positions of paths
that have ended (`BranchPolicy.choose_expansions`), and the tree starts the forks.
`rollout.branching=released` runs in lock-step without a policy (see `lockstep_arpo`).

A rule is a subclass of `BranchPolicy` with `num_forks` and, if it asks elsewhere, `asks_at`. It can
stay in a file of your own: `rollout.branching=FILE.py`, see `examples/my_branching.py`; if it is a
dataclass, its fields are options, `rollout.branching_options`. To add one here:

1. Add a choice to `config.enums.Branching`.
2. Write the class here and register it with `@register_branch_policy(Branching.<choice>)`.
3. Test its decisions in `test_branch_policy`, and add it to `test_branching_properties.WAYS`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from mega_agentrl.algo.aepo import branch_penalty, initial_rollouts
from mega_agentrl.algo.branching import branch_probability, should_branch
from mega_agentrl.config.algorithm_traits import BRANCHING_RULES
from mega_agentrl.config.enums import Branching, ForkBudgetMode
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.rollout import BranchConfig
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from mega_agentrl.config.sections.rollout import RolloutConfig
    from mega_agentrl.types.records import Trajectory

PolicyTypeT = TypeVar("PolicyTypeT", bound="type[BranchPolicy]")

MIN_PROBE_TOKENS = 5
"""Shorter turns never fork: the mean over fewer entropies is noise."""

_POLICY_TYPES: dict[str, type[BranchPolicy]] = {}


@dataclass(slots=True, kw_only=True, frozen=True)
class TurnStart:
    """The start of an assistant turn, where a policy may ask for forks."""

    path: tuple[int, ...]
    position: int
    """Number of response tokens before the turn."""
    previous_role: Role
    """Author of the preceding turn."""
    num_slots: int
    """Forks the path may still make."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ForkPoint:
    """A position where a policy has asked for forks, after the probe was sampled."""

    path: tuple[int, ...]
    num_slots: int
    """Forks the path may still make."""
    baseline: float
    """Mean entropy at the root, nats."""
    probe_entropies: Sequence[float]
    """Exact entropies of the tokens sampled after the position, nats."""
    num_consecutive_forks: int = 0
    """Number of most recent consecutive decisions on the path from the root that forked."""


class Expansion(NamedTuple):
    """A position of a path that has ended, from which another path is to start."""

    path: tuple[int, ...]
    """The path that got there first; () for a fresh root."""
    position: int
    """Number of response tokens before it; at the start of an assistant turn, or inside one."""


class ForkBudget(Protocol):
    """The fork slots that a path may use."""

    @property
    def num_left(self) -> int:
        """Number of forks the path may still make."""

    def spend(self, num_forks: int) -> Sequence[ForkBudget]:
        """Use up slots for at most `num_left` forks and return the budgets of the forks."""


@dataclass(slots=True)
class PathBudget:
    """Slots of a single path; after a fork the rest is split evenly, in path order."""

    num_left: int

    def spend(self, num_forks: int) -> Sequence[PathBudget]:
        """Use up slots; the remainder of the split goes to the path itself and the first forks."""
        self.num_left, *others = split_evenly(self.num_left - num_forks, num_forks + 1)
        return [PathBudget(slots) for slots in others]


@dataclass(slots=True)
class SharedBudget:
    """Slots shared by all paths of a prompt on a first-come basis; the tree depends on timing."""

    num_left: int

    def spend(self, num_forks: int) -> Sequence[SharedBudget]:
        """Use up slots; each fork shares this budget."""
        self.num_left -= num_forks
        return [self] * num_forks


@dataclass(frozen=True)
class BranchPolicy(ABC):
    """Base class of branching rules, with the roots, slots and baseline of ARPO.

    A policy has no state that depends on the order of calls. Members are listed in the order in
    which a tree uses them.
    """

    config: BranchConfig = field(default_factory=BranchConfig)

    @property
    def num_probe_tokens(self) -> int:
        """Tokens to sample where the policy asks, before it decides; 0 never asks."""
        return self.config.num_probe_tokens

    def needs_monitor_root(self, num_trajectories: int) -> bool:
        """Return whether a first root must run to its end, without forks, before `fork_slots`."""
        del num_trajectories
        return False

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return the fork slots of each root that is still to start.

        Roots to start, slots and the monitored root add up to `num_trajectories`. By default N
        roots divide M - N slots; a policy that never asks starts M roots.

        Args:
            num_trajectories: M, including the monitored root.
            monitored: The first root, if `needs_monitor_root`.
        """
        del monitored
        if not self.num_probe_tokens:
            return (0,) * num_trajectories
        num_roots = num_configured_roots(self.config, num_trajectories)
        return split_evenly(num_trajectories - num_roots, num_roots)

    def baseline_entropy(self, entropies: Sequence[float]) -> float | None:
        """Return the baseline from the entropies of a root's first turn; None disables forks."""
        return mean_probe_entropy(entropies, self.num_probe_tokens)

    def asks_at(self, turn: TurnStart) -> bool:
        """Return whether to probe and decide at a turn: by default at those after a tool answer.

        It is called for every turn of a path that has slots and a baseline, except for the path's
        first one, and only if the session of the simulated user can fork.
        """
        return self.forks_after(turn.previous_role)

    def forks_after(self, role: Role) -> bool:
        """Return whether a turn after one of this author may fork."""
        return role is Role.tool or (role is Role.user and self.config.after_user_messages)

    @property
    def num_expansion_rounds(self) -> int:
        """Number of rounds of forks from paths that have ended.

        Above 0, turns keep a copy of their tools, and `choose_expansions` uses the slots that
        `fork_slots` leaves out.
        """
        return 0

    def choose_expansions(self, ended: Sequence[Trajectory], num_forks: int) -> Sequence[Expansion]:
        """Return where to start paths in a round, at most `num_forks`.

        Args:
            ended: All trajectories so far, in path order.
            num_forks: Number of paths to start.
        """
        del ended, num_forks
        return ()

    @abstractmethod
    def num_forks(self, point: ForkPoint) -> int:
        """Return how many forks to make here; the slots bound them."""

    def probability(self, point: ForkPoint) -> float | None:
        """Return P for the record of the decision, not clamped; None if there is no P."""
        del point
        return None

    @property
    def threshold(self) -> float | None:
        """Value that P must exceed for a fork, for the record; None if there is no P."""
        return None


def register_branch_policy(*choices: str) -> Callable[[PolicyTypeT], PolicyTypeT]:
    """Return a class decorator that selects the policy for values of `rollout.branching`."""

    def register(policy_type: PolicyTypeT) -> PolicyTypeT:
        for choice in choices:
            assert choice not in _POLICY_TYPES, f"rollout.branching={choice} has two policies"
            _POLICY_TYPES[choice] = policy_type
        return policy_type

    return register


def make_branch_policy(config: RolloutConfig) -> BranchPolicy:
    """Return the branch policy of `rollout.branching`."""
    if config.has_user_branching:
        rule = load_user_branching(config.branching)
        return rule(config.branch, **config.branching_options)
    return _POLICY_TYPES[config.branching](config.branch)


@cache
def load_user_branching(reference: str) -> type[BranchPolicy]:
    """Load and check a user's rule, `rollout.branching=/folder/file.py:Class`.

    It runs on the driver, in the event loop of the rollouts.

    Raises:
        ConfigError: There is no such class, or it is not a complete `BranchPolicy`.
    """
    key, expected = BRANCHING_RULES.key, BRANCHING_RULES.expected
    default_name = BRANCHING_RULES.default_name
    rule = load_user_object(reference, key, expected, default_name=default_name)
    if not (isinstance(rule, type) and issubclass(rule, BranchPolicy)):
        raise ConfigError(key, reference, expected, f"got {rule!r}")
    if inspect.isabstract(rule):
        raise ConfigError(key, reference, expected, f"{rule.__name__} does not define num_forks")
    return rule


@register_branch_policy(Branching.none, Branching.released)
class NoBranching(BranchPolicy):
    """No branching: all trajectories are independent."""

    @property
    def num_probe_tokens(self) -> int:
        """0: the policy never asks."""
        return 0

    def num_forks(self, point: ForkPoint) -> int:
        """Return 0."""
        del point
        return 0


@register_branch_policy(Branching.after_result)
class ArpoBranching(BranchPolicy):
    """ARPO's rule (arXiv 2507.19849): fork if alpha + beta * (H - baseline) > tau.

    H is the mean entropy of the probe.
    """

    def num_forks(self, point: ForkPoint) -> int:
        """Return `num_forks_per_decision`, as far as there are slots, if P exceeds tau."""
        p = self.probability(point)
        if p is None:
            return 0
        forks = min(self.config.num_forks_per_decision, point.num_slots)
        return forks * should_branch(p, tau=self.config.tau)

    def probability(self, point: ForkPoint) -> float | None:
        """Return P = alpha + beta * (H - baseline); None with too few probed tokens."""
        entropy = mean_probe_entropy(point.probe_entropies, self.num_probe_tokens)
        if entropy is None:
            return None
        config = self.config
        return branch_probability(entropy - point.baseline, alpha=config.alpha, beta=config.beta)

    @property
    def threshold(self) -> float | None:
        """`rollout.branch.tau`."""
        return self.config.tau


@register_branch_policy(Branching.aepo)
class AepoBranching(ArpoBranching):
    """AEPO's rule (arXiv 2510.14545), which differs from ARPO's in two points.

    **Number of roots.** The entropy at the question (H_root, the baseline) and the mean entropy
    over the tool steps (H_tool) determine how the M trajectories are split into N roots and M - N
    forks: `algo.aepo.initial_rollouts`. To measure both, one root runs first, without forks, and
    the others start when it has ended. This monitored root is one of the N roots, so no sample is
    wasted and the tree does not depend on timing. Since a trajectory that has ended cannot fork,
    one more root starts if N is 1, to use the slots. H_tool is the mean over the monitored root's
    turns after a tool answer, each measured like a probe. If there is no such turn or the root
    fails, N is the configured number. No root is monitored if `rollout.branch.initial_rollouts` is
    set.

    **Penalty on consecutive forks.** P = (alpha + beta * dH) * max(0, 1 - penalty * l) > tau,
    where l is the number of most recent consecutive decisions on the path from the root that
    forked. Forks inherit l. (The released code counts per prompt and round; this tree has no
    rounds.)
    """

    def needs_monitor_root(self, num_trajectories: int) -> bool:
        """Return whether the number of roots has to be measured with a first root."""
        is_measured = self.config.initial_rollouts is None and self.num_probe_tokens > 0
        return is_measured and num_trajectories > 1

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return the fork slots of each root; `monitored` is the first root, once it has ended."""
        if monitored is None:
            return super().fork_slots(num_trajectories)
        h_root, h_tool = monitored.baseline_entropy, self._tool_entropy(monitored)
        if h_root is None or h_tool is None or monitored.failed:
            num_roots = num_configured_roots(self.config, num_trajectories)
        else:
            num_roots = initial_rollouts(num_trajectories, h_root, h_tool)
        num_remaining = max(1, num_roots - 1)
        return split_evenly(num_trajectories - 1 - num_remaining, num_remaining)

    def probability(self, point: ForkPoint) -> float | None:
        """Return the penalized P, or None with too few probed tokens."""
        p = super().probability(point)
        if p is None:
            return None
        rate = self.config.consecutive_penalty
        return p * branch_penalty(point.num_consecutive_forks, rate=rate)

    def _tool_entropy(self, trajectory: Trajectory) -> float | None:
        """Return the mean probe entropy over turns after a tool answer, None without them."""
        means = [
            mean_probe_entropy(trajectory.entropies[turn.start : turn.stop], self.num_probe_tokens)
            for previous, turn in pairwise(trajectory.turns)
            if self.forks_after(previous.role) and turn.role is Role.assistant
        ]
        known = [mean for mean in means if mean is not None]
        return fmean(known) if known else None


class ExpandingBranching(NoBranching, ABC):
    """Base class of rules that start N roots, and all forks from paths that have ended."""

    def fork_slots(
        self, num_trajectories: int, monitored: Trajectory | None = None
    ) -> tuple[int, ...]:
        """Return N roots without slots of their own."""
        del monitored
        return (0,) * num_configured_roots(self.config, num_trajectories)

    @property
    @abstractmethod
    def num_expansion_rounds(self) -> int:
        """Number of rounds of forks, at least 1."""

    @abstractmethod
    def choose_expansions(self, ended: Sequence[Trajectory], num_forks: int) -> Sequence[Expansion]:
        """Return where to start paths in a round, at most `num_forks`."""


@register_branch_policy(Branching.at2po)
class At2poBranching(ExpandingBranching):
    """AT2PO's rule (arXiv 2601.04767): sample the turns of highest entropy anew.

    N roots run to their end. Then, in each of a few rounds, the turns with the highest score get
    another path, which branches off before the turn:

        mean entropy of the turn - sibling_penalty * number of its siblings

    Siblings are the other turns that were sampled from the same state, for example the first turns
    of all roots. As in the code released with the paper, a path's last turn is not sampled anew, a
    first turn becomes a fresh root, and turns are chosen again if there are fewer than forks. The
    paper estimates the entropy from the log-probs of the turn's tokens; here it is exact.
    """

    @property
    def num_expansion_rounds(self) -> int:
        """`rollout.branch.num_expansion_rounds`."""
        return self.config.num_expansion_rounds

    def choose_expansions(self, ended: Sequence[Trajectory], num_forks: int) -> Sequence[Expansion]:
        """Return where the turns with the highest scores start; equal ones in path order."""
        by_path = {trajectory.path: trajectory for trajectory in ended}
        num_turns: Counter[Expansion] = Counter()
        turns: list[tuple[float, Expansion]] = []
        for trajectory in ended:
            for turn in trajectory.turns:
                is_new_turn = trajectory.fork_len <= turn.start < turn.stop
                if turn.role is not Role.assistant or not is_new_turn:
                    continue
                state = _find_state(trajectory.path, turn.start, by_path)
                num_turns[state] += 1
                if not trajectory.failed and turn.index < len(trajectory.turns) - 1:
                    entropy = fmean(trajectory.entropies[turn.start : turn.stop])
                    turns.append((entropy, state))
        penalty = self.config.sibling_penalty
        turns.sort(key=lambda turn: penalty * (num_turns[turn[1]] - 1) - turn[0])
        return [state for _, state in islice(cycle(turns), num_forks)]


@register_branch_policy(Branching.appo)
class AppoBranching(ExpandingBranching):
    """APPO's rule (arXiv 2606.12384): sample the tokens of highest score anew, anywhere in a turn.

    N roots run to their end. Then the tokens with the highest scores get another path each, which
    branches off before the token. The score is the entropy, in standard deviations above the mean
    over the path's sampled tokens; only tokens above the mean are chosen.

    The paper multiplies by a standardised "future value". Before rewards are known there is none;
    the released code takes the mismatch of engine and trainer (`algo.appo`), and without the
    trainer's log-probs the entropy alone, as here. It keeps the token of high entropy in the fork;
    here that token itself is sampled anew.
    """

    @property
    def num_expansion_rounds(self) -> int:
        """1: all positions are chosen from the roots."""
        return 1

    def choose_expansions(self, ended: Sequence[Trajectory], num_forks: int) -> Sequence[Expansion]:
        """Return the positions of the tokens with the highest scores, equal ones in path order."""
        by_path = {trajectory.path: trajectory for trajectory in ended}
        tokens: list[tuple[float, Expansion]] = []
        for trajectory in ended:
            indices = range(trajectory.fork_len, len(trajectory.loss_mask))
            sampled = [index for index in indices if trajectory.loss_mask[index]]
            if trajectory.failed or not sampled:
                continue
            mean = fmean(trajectory.entropies[index] for index in sampled)
            excess = [trajectory.entropies[index] - mean for index in sampled]
            spread = math.sqrt(fmean(value * value for value in excess))
            tokens += [
                (value / spread, _find_state(trajectory.path, index, by_path))
                for index, value in zip(sampled, excess, strict=True)
                if value > 0
            ]
        tokens.sort(key=lambda token: -token[0])
        return [state for _, state in tokens[:num_forks]]


def _find_state(
    path: tuple[int, ...], position: int, by_path: Mapping[tuple[int, ...], Trajectory]
) -> Expansion:
    """Return the position as an `Expansion` of the path that reached it first."""
    while len(path) > 1 and position <= by_path[path].fork_len:
        path = path[:-1]
    return Expansion(path if position else (), position)


def mean_probe_entropy(entropies: Sequence[float], num_probe_tokens: int) -> float | None:
    """Return the mean over the first k entropies, or None with too few of them or k = 0.

    At least min(`MIN_PROBE_TOKENS`, k) entropies are required.
    """
    if not num_probe_tokens or len(entropies) < min(MIN_PROBE_TOKENS, num_probe_tokens):
        return None
    return fmean(entropies[:num_probe_tokens])


def num_configured_roots(config: BranchConfig, num_trajectories: int) -> int:
    """Return N: `rollout.branch.initial_rollouts`, or half of M if that is unset.

    Raises:
        ValueError: N is not between 1 and M.
    """
    configured = config.initial_rollouts
    num_roots = max(1, num_trajectories // 2) if configured is None else configured
    if not 1 <= num_roots <= num_trajectories:
        expected = f"between 1 and rollout.group_size={num_trajectories}"
        raise ConfigError("rollout.branch.initial_rollouts", num_roots, expected)
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

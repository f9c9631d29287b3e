"""The cost of a run of the comparison, its budget, and when the run is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.types.records import RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCost:
    """Cost of training rollouts; a prefix that several trajectories share counts once."""

    num_tokens: int = 0
    """Tokens that the policy sampled."""
    num_tool_calls: int = 0
    """Tool calls that were executed; invalid calls are not."""

    @classmethod
    def of_trees(cls, trees: Iterable[RolloutTree]) -> RolloutCost:
        """Return the cost of finished trees, including failed and greedy trajectories."""
        num_tokens = num_calls = 0
        for tree in trees:
            for trajectory in tree.all_trajectories:
                num_tokens += sum(trajectory.loss_mask[trajectory.fork_len :])
                num_calls += sum(
                    turn.outcome is not None
                    and not turn.outcome.is_invalid_call
                    and turn.start >= trajectory.fork_len
                    for turn in trajectory.turns
                )
        return cls(num_tokens=num_tokens, num_tool_calls=num_calls)

    def __add__(self, other: RolloutCost) -> RolloutCost:
        return RolloutCost(
            num_tokens=self.num_tokens + other.num_tokens,
            num_tool_calls=self.num_tool_calls + other.num_tool_calls,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget of generated tokens, or of steps."""

    num_tokens: int
    """Number of generated tokens, unless `num_steps` is set."""
    num_steps: int | None
    """Number of steps; None for a budget of tokens."""
    num_evaluations: int
    """Number of evaluations at equal fractions of the budget, after the one before training."""

    def fraction_spent(self, step: int, spent: RolloutCost) -> float:
        """Return the fraction of the budget that is spent; 1 or more means all of it."""
        if self.num_steps is not None:
            return step / self.num_steps
        return spent.num_tokens / self.num_tokens

    def num_evaluations_due(self, step: int, spent: RolloutCost) -> int:
        """Return how many evaluations are due by now, without the one before training."""
        return min(
            self.num_evaluations,
            int(self.fraction_spent(step, spent) * self.num_evaluations + 1e-9),
        )

    def __str__(self) -> str:
        if self.num_steps is not None:
            return f"{self.num_steps} steps"
        return f"{self.num_tokens:,} tokens"

"""The budget of a run of the comparison, and when the run is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from mega_agentrl.train.resume.run_state import RolloutCost


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

"""What a run of the comparison may spend, and when it is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from mega_agentrl.train.run_state import Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a run may spend: num_tokens, or num_steps where that is not None.

    num_marks: evaluations after the one before training, at equal shares.
    """

    num_tokens: int
    num_steps: int | None
    num_marks: int

    def share(self, step: int, spent: Spent) -> float:
        """What is spent; 1 and more is all."""
        if self.num_steps is not None:
            return step / self.num_steps
        return spent.num_tokens / self.num_tokens

    def num_due(self, step: int, spent: Spent) -> int:
        """How many marks should have been made by now, without the one before training."""
        return min(self.num_marks, int(self.share(step, spent) * self.num_marks + 1e-9))

    def __str__(self) -> str:
        if self.num_steps is not None:
            return f"{self.num_steps} steps"
        return f"{self.num_tokens:,} tokens"

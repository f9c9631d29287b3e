"""Stops a run in which more trajectories fail than `rollout.max_failed_fraction` allows.

Trajectories count as well that are scored although their agent crashed or their time was over,
because the policy may have caused it: if most end so, the agent or a tool has an error.

An evaluation stops the run at once, because its means go into the final table. In training two
steps in a row must exceed the bound: a lost host of sandboxes or a restarted reward server costs
the trajectories that are under way, and the run goes on with the next step. The step that stops
the run is not trained on, so that the last checkpoint is as good as in any other interrupted run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.types.errors import TooManyFailedError

if TYPE_CHECKING:
    from mega_agentrl.rollout.metrics.failures import FailureCounts

MAX_FAILED_STEPS = 2
"""Number of steps in a row that exceed the bound until the run stops."""


class FailureGuard:
    """Compares counts of failed trajectories with the bound.

    Args:
        bound: `rollout.max_failed_fraction`.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._num_failed_steps = 0

    def check_step(self, step: int, counts: FailureCounts) -> None:
        """Raise `TooManyFailedError` if this step and the one before exceed the bound."""
        if not counts.exceeds(self._bound):
            self._num_failed_steps = 0
            return
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            where = f"RL step {step}, and the step before it"
            raise self._make_error(where, counts, is_training=True)

    def check_evaluation(self, when: str, counts: FailureCounts) -> None:
        """Raise `TooManyFailedError` if the evaluation exceeds the bound."""
        if counts.exceeds(self._bound):
            where = f"held-out evaluation {when} RL"
            raise self._make_error(where, counts, is_training=False)

    def _make_error(
        self, where: str, counts: FailureCounts, *, is_training: bool
    ) -> TooManyFailedError:
        return TooManyFailedError(
            where=where,
            is_training=is_training,
            num_failed=counts.num_failed,
            num_suspect=counts.num_suspect,
            num_trajectories=counts.num_trajectories,
            bound=self._bound,
            reason=counts.first_reason or counts.first_suspect,
        )

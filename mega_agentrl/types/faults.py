"""What is raised when a tool session, a reward or a process of the run, and not the policy, failed.

A tool's fault carries a typed outcome, as a failed call does, so that the trajectory which ends
by it says which tool failed at what, and the metrics count it. It is for failures outside of a
call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.types.records import ToolOutcome


class ToolFault(RuntimeError):
    """One step of a tool's life (`create`, `fork`, `calc_reward`, `release`) failed."""

    def __init__(self, outcome: ToolOutcome) -> None:
        super().__init__(f"tool {outcome.tool}: {outcome.answer}")
        self.outcome = outcome


class RewardFault(RuntimeError):
    """A reward that could not be had: its function or its model failed, or was too late."""


class RankLostError(RuntimeError):
    """A rank of the policy died or hangs: what the others hold of the policy is of no use."""


class ModelLostError(RuntimeError):
    """A rank of the critic or of the reward model died or hangs, which ends this process's run.

    Nothing is wrong with the run's settings: a new start goes on from its last checkpoint.
    """


class EngineLostError(RuntimeError):
    """An engine that answers for itself no more, although its process may still be there."""

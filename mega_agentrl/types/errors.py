"""Errors for failures of a tool session, a reward or a process of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.types.records import ToolOutcome


class ToolSessionError(RuntimeError):
    """A step of a tool's life cycle (`create`, `fork`, `calc_reward`, `release`) failed.

    Carries the typed outcome, as a failed call does, so that the trajectory it ends records which
    tool failed and the metrics count it. Failed calls return their outcome and do not raise.
    """

    def __init__(self, outcome: ToolOutcome) -> None:
        super().__init__(f"tool {outcome.tool}: {outcome.answer}")
        self.outcome = outcome


class RewardError(RuntimeError):
    """A reward function or a reward model failed or timed out."""


class RankLostError(RuntimeError):
    """A rank of the policy died or hangs, so that the remaining ranks are unusable."""


class AuxiliaryModelLostError(RuntimeError):
    """A rank of the critic or of the reward model died or hangs, which ends the process.

    The settings are not at fault: a restarted run continues from its last checkpoint.
    """


class EngineLostError(RuntimeError):
    """An engine no longer responds, although its process may still exist."""

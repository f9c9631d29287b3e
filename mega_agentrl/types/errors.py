"""Errors for failures of a tool session, a reward or a process of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.types.records import ToolOutcome


class ToolSessionError(RuntimeError):
    """A step of a tool's life cycle (`create`, `fork`, `calc_reward`, `release`) failed.

    The error carries a `ToolOutcome`, from which the trajectory records the failed tool and the
    metrics count the failure. A failed call returns its outcome instead of raising.
    """

    def __init__(self, outcome: ToolOutcome) -> None:
        super().__init__(f"tool {outcome.tool}: {outcome.answer}")
        self.outcome = outcome


class RewardError(RuntimeError):
    """A reward function or a reward model failed or timed out."""


class RewardAbstainedError(RewardError):
    """All parts of a rubric gave no score to a trajectory, which is not a failure."""


class RankLostError(RuntimeError):
    """A rank of the policy died or hangs, so that the remaining ranks are unusable."""


class AuxiliaryModelLostError(RuntimeError):
    """A rank of the critic or of the reward model died or hangs, so that the model is unusable.

    The settings are not at fault: the run continues from its last checkpoint.
    """


class EngineLostError(RuntimeError):
    """An engine no longer responds, although its process may still exist."""


class EngineRefusalError(RuntimeError):
    """An engine refuses requests until a weight update succeeds."""

    def __init__(self, engine: str, operation: str, reason: str) -> None:
        super().__init__(engine, operation, reason)
        self.engine = engine
        """Name of the engine."""
        self.operation = operation
        """The refused operation: generate or serve."""
        self.reason = reason
        """Why it is refused, such as the failure of an update."""

    def __str__(self) -> str:
        """Return the message."""
        return f"{self.engine} refuses to {self.operation}: {self.reason}"


class RunStoppedError(Exception):
    """The run stops, because so much of it fails that its results would mislead.

    This is not a `RuntimeError`: engines and tools raise those, and each costs one trajectory only.
    Checkpoints stay valid.
    """


class FirstCallsFailedError(RunStoppedError):
    """A tool or a reward function failed on all of its first calls (`types.first_calls`)."""

    def __init__(
        self, *, name: str, source: str, num_calls: int, error: str, location: str
    ) -> None:
        super().__init__(name, source, num_calls, error, location)
        self.name = name
        """What was called, for example `tool notes`."""
        self.source = source
        """File or import path of its code."""
        self.num_calls = num_calls
        """Number of first calls, all of which failed."""
        self.error = error
        """Type and text of the last exception."""
        self.location = location
        """Last line of its traceback; empty if there is none."""

    def __str__(self) -> str:
        """Return the message, with the setting that changes the bound."""
        where = f", raised at {self.location}" if self.location else ""
        return (
            f"{self.name} ({self.source}): all of its first {self.num_calls} calls failed, "
            f"expected at least one to succeed; the last error: {self.error}{where}. Probable "
            "cause: an error in its code, or something that it needs is missing. Fix it and start "
            "the same command again. rollout.max_failed_first_calls sets the number of calls (0: "
            "never stop)"
        )


class TooManyFailedError(RunStoppedError):
    """More trajectories failed than `rollout.max_failed_fraction` allows."""

    def __init__(
        self,
        *,
        where: str,
        is_training: bool,
        num_failed: int,
        num_trajectories: int,
        bound: float,
        reason: str,
        num_suspect: int = 0,
    ) -> None:
        super().__init__(
            where, is_training, num_failed, num_trajectories, bound, reason, num_suspect
        )
        self.where = where
        """Part of the run, for example `RL step 3`."""
        self.is_training = is_training
        """Whether the trajectories would have been trained on."""
        self.num_failed = num_failed
        self.num_suspect = num_suspect
        """Further ones that are scored although their agent crashed or their time was over."""
        self.num_trajectories = num_trajectories
        self.bound = bound
        """`rollout.max_failed_fraction`."""
        self.reason = reason
        """Why the first of them failed."""

    def __str__(self) -> str:
        """Return the message, with the setting that changes the bound."""
        untrained = " and are not trained on" if self.is_training else ""
        suspect = ""
        if self.num_suspect:
            suspect = f"; of {self.num_suspect} others the agent crashed or the time was over"
        return (
            f"{self.where}: {self.num_failed} of {self.num_trajectories} trajectories failed, "
            f"expected at most a share of rollout.max_failed_fraction={self.bound:g}{suspect}; the "
            f"first one: {self.reason}. Failed trajectories count in no mean{untrained}, so the "
            "metrics would describe only the rest. Probable cause: a tool, a reward function or an "
            "agent that fails or is too slow; logs/driver.log names each failure. Fix it and start "
            "the same command again, or raise the bound (1: never stop). Exceptions of an agent "
            "that the policy causes belong in rollout.agent.policy_errors"
        )

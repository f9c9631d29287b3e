"""Shared context of a rollout pass, fork snapshots and trajectory states."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import RolloutConfig
    from mega_agentrl.rollout.branching.policy import BranchPolicy
    from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
    from mega_agentrl.rollout.io.tree_store import TreeStore
    from mega_agentrl.rollout.tracing import RolloutSpans
    from mega_agentrl.types.protocols import (
        Generator,
        InteractionProvider,
        TextCodec,
        ToolProvider,
        ToolSession,
        UserSimulatorSession,
    )
    from mega_agentrl.types.records import ContextReset

INFRA_ERRORS = (RuntimeError, OSError)
"""Exceptions of engines and tools that are not the policy's fault (see `types.protocols`)."""


class TrajectoryState(StrEnum):
    """The state of a trajectory."""

    pending = "pending"
    generating = "generating"
    tool_calling = "tool_calling"
    interacting = "interacting"
    completed = "completed"
    failed = "failed"


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutContext:
    """Everything that the trajectories of one rollout pass share."""

    generator: Generator
    tools: ToolProvider
    codec: TextCodec
    """Must be a `ChatCodec` if tools are called by JSON or a user is simulated."""
    policy: BranchPolicy
    config: RolloutConfig
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_model_len: int
    """Maximum tokens of prompt plus response."""
    seed: int
    step: int | str
    """Name of the pass, such as a training step or an evaluation; part of every request seed."""
    interactions: InteractionProvider | None = None
    """Simulated users and environments."""
    spans: RolloutSpans | None = None
    """Recorder of OpenTelemetry spans; None disables tracing."""
    with_greedy: bool = False
    """Whether each group gets a greedy trajectory in addition (see `groups.greedy`)."""
    emitted_warnings: set[str] = field(default_factory=set)
    """Keys of warnings that were already logged in this pass."""
    tree_store: TreeStore | None = None
    """Store of finished trees, from which a restarted run restores them."""
    max_version_lag: int = 0
    """Maximum weight versions by which tokens of a restored tree may lag behind the engine."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ForkSnapshot:
    """The state of a trajectory at the point where a fork starts."""

    parent_id: str
    token_buffer: TokenBuffer
    """Copy of the parent's tokens up to the fork."""
    tool_session: ToolSession | RuntimeError | OSError
    """Forked tools, or the error that forking them raised."""
    num_calls: int
    """Tool calls of the parent so far."""
    baseline_entropy: float
    """Baseline entropy of the root, nats."""
    num_consecutive_forks: int
    """Most recent decisions on the path, without a gap, that forked."""
    user_session: UserSimulatorSession | RuntimeError | OSError | None = None
    """Forked user, or the error that forking it raised; None without a user."""
    deadline_s: float | None = None
    """Event-loop time at which `rollout.trajectory_timeout_s` is over; None without a limit."""
    context_resets: tuple[ContextReset, ...] = ()

"""What trajectories share and what a fork starts from; the states of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import RolloutConfig
    from mega_agentrl.rollout.branching import BranchPolicy
    from mega_agentrl.rollout.spans import RolloutSpans
    from mega_agentrl.rollout.tape import Tape
    from mega_agentrl.rollout.tree_store import TreeStore
    from mega_agentrl.types.ports import (
        Generator,
        Interactions,
        TextCodec,
        ToolProvider,
        ToolSession,
        UserSession,
    )
    from mega_agentrl.types.records import Restart

FAULTS = (RuntimeError, OSError)
"""What engines and tools raise when they, and not the policy, failed (see `types.ports`)."""


class State(StrEnum):
    """Where a trajectory stands."""

    pending = "pending"
    generating = "generating"
    tool_calling = "tool_calling"
    interacting = "interacting"
    completed = "completed"
    failed = "failed"


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutContext:
    """What all trajectories of one `collect` share.

    step: names the pass over the prompts (training step, evaluation); keys the seeds.
    temperature: of sampling, 0 is greedy. max_model_len: prompt plus response, tokens.
    codec: a `ports.ChatCodec` where anything but tags is used. interactions: users and
    environments to talk to, None for none. spans: of the trajectories, None for none.
    with_greedy: every group gets a greedy answer beside it (`greedy`). warned: what was said once
    already.
    store: keeps finished trees for a run that goes on after a crash; None for none. max_age: how
    many versions older than what is served the tokens of a kept tree may be.
    """

    generator: Generator
    tools: ToolProvider
    codec: TextCodec
    policy: BranchPolicy
    config: RolloutConfig
    temperature: float
    max_model_len: int
    seed: int
    step: int | str
    interactions: Interactions | None = None
    spans: RolloutSpans | None = None
    with_greedy: bool = False
    warned: set[str] = field(default_factory=set)
    store: TreeStore | None = None
    max_age: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class Origin:
    """What a fork starts from; a fault instead of a session: it could not be forked.

    until_s: when the path's wall time is over, on the event loop's clock.
    """

    parent_id: str
    tape: Tape
    session: ToolSession | RuntimeError | OSError
    num_calls: int
    baseline: float
    streak: int
    user: UserSession | RuntimeError | OSError | None = None
    until_s: float | None = None
    restarts: tuple[Restart, ...] = ()

"""The agent of a run with everything that its attempts share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.rollout.agents.policy_errors import PolicyErrors

if TYPE_CHECKING:
    from mega_agentrl.rollout.agents.agent_loop import AgentLoop
    from mega_agentrl.rollout.agents.base import Agent
    from mega_agentrl.rollout.gateway.server import Gateway
    from mega_agentrl.rollout.gateway.settings import GatewaySettings


@dataclass(slots=True, kw_only=True, frozen=True)
class LoadedAgent:
    """The agent of a run, before its gateway exists."""

    agent: Agent
    gateway: GatewaySettings
    timeout_s: float
    """Maximum duration of an attempt."""
    max_concurrent: int
    """Maximum number of attempts that run at once."""
    policy_errors: PolicyErrors
    """Exceptions of the agent that the policy causes."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentHost:
    """The agent of a run, the gateway that serves it and the loop that it runs on."""

    agent: Agent
    gateway: Gateway
    loop: AgentLoop
    timeout_s: float
    """Maximum duration of an attempt."""
    max_concurrent: int
    """Maximum number of attempts that run at once."""
    policy_errors: PolicyErrors = field(default_factory=PolicyErrors)
    """Exceptions of the agent that the policy causes."""
    slots: asyncio.Semaphore = field(init=False)
    """One for each attempt that may run at once; first come, first served."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", asyncio.Semaphore(self.max_concurrent))

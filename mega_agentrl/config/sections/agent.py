"""Settings of the user's own agent, the block `rollout.agent`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mega_agentrl.config.ranges import MAX_TIMEOUT_S, Length, Range, Section

AGENT_OUTPUT_LOGGER = "mega_agentrl.agent_output"
"""Logger of what agents write that are commands; it has a file of its own, `logs/agents.log`."""


@dataclass
class AgentConfig(Section, key="rollout.agent"):
    """Keys of `rollout.agent` beside `_target_` and `gateway`.

    Any other key of the block is an argument of the user's function or class.
    """

    timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 600.0
    """Maximum number of seconds of an attempt, without the wait for `max_concurrent`, on each of
    the two clocks of `rollout.trajectory_timeout_s`, which holds as well."""
    max_concurrent: Annotated[int | None, Range(at_least=1, at_most=65_536)] = None
    """Maximum number of attempts that run at once; others wait for their turn. null is 1024, and
    for a command 16 per CPU core, at most 400."""
    policy_errors: Annotated[list[str], Length(at_most=1000)] = field(default_factory=list)
    """Further exceptions of the agent that the policy causes, such as `json.JSONDecodeError` or
    `FILE.py:NAME`: the attempt is then scored, with 0 as the agent's part, and not masked. Those of
    known frameworks, and `PolicyError`, need not be named."""

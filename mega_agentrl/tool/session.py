"""All tools of one trajectory: `ports.ToolSession`.

`execute` consumes a parsed call and produces a typed outcome; it waits for the tool, at most
its deadline, and is unblocked by the answer, the deadline or cancellation. This is the one
place where whatever a tool raises becomes an outcome: `ValueError` and a missing argument
are the policy's (`user_error`), the deadline is `timeout`, anything else is ours
(`infra_error`). Calls of one session are sequential; sessions are independent.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from mega_agentrl.tool.protocol import ToolAnswer
from mega_agentrl.types.records import ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.tool.outcomes import OutcomeCounter
    from mega_agentrl.tool.protocol import Tool

_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class TrajectoryTools:
    """A session over the run's tools; `create` chooses which of them this prompt gets."""

    def __init__(self, tools: Mapping[str, Tool], outcomes: OutcomeCounter) -> None:
        self._tools = tools
        self._outcomes = outcomes
        self._kwargs: Mapping[str, Mapping[str, Any]] = {}
        self._states: dict[str, Any] = {}

    async def create(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the state of the tools named in `tools_kwargs`; of all where it is empty.

        A name with the value None is left out: that is how a parquet column of structs reads
        where a row lacks the key. Raises `ValueError` for an unknown tool or kwargs key.
        """
        wanted = {name: value for name, value in tools_kwargs.items() if value is not None}
        check_tools_kwargs(wanted, self._tools)
        self._kwargs = wanted
        for name in wanted or self._tools:
            self._states[name] = await self._tools[name].create(self._of(name, "create_kwargs"))

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run one call to a typed outcome; raises only cancellation."""
        begin = time.monotonic()
        answer = await self._answer(tool, arguments)
        outcome = ToolOutcome(
            tool=tool,
            status=answer.status,
            answer=answer.text,
            latency_s=time.monotonic() - begin,
            step_reward=answer.step_reward,
            metrics=answer.metrics,
        )
        self._outcomes.add(outcome)
        return outcome

    async def fork(self) -> TrajectoryTools:
        """A session whose tools' states are copies."""
        child = TrajectoryTools(self._tools, self._outcomes)
        child._kwargs = self._kwargs
        for name, state in self._states.items():
            child._states[name] = await self._tools[name].fork(state)
        return child

    async def calc_reward(self) -> dict[str, float]:
        """Final reward by tool; tools that give none are left out."""
        rewards: dict[str, float] = {}
        for name, state in self._states.items():
            reward = await self._tools[name].calc_reward(
                state, self._of(name, "calc_reward_kwargs")
            )
            if reward is not None:
                rewards[name] = float(reward)
        return rewards

    async def release(self) -> None:
        """Free every state; a second call does nothing."""
        while self._states:
            name, state = self._states.popitem()
            await self._tools[name].release(state, self._of(name, "release_kwargs"))

    def _of(self, name: str, key: str) -> Mapping[str, Any]:
        return self._kwargs.get(name, {}).get(key) or {}

    async def _answer(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        if tool not in self._states:
            return _user_error(f"Tool({tool}) is not available; there is {sorted(self._states)}.")
        runner, state = self._tools[tool], self._states[tool]
        if runner.argument not in arguments:
            return _user_error(f"Tool({tool}) needs the argument {runner.argument!r}.")
        try:
            async with asyncio.timeout(runner.deadline_s) as deadline:
                return await runner.execute(state, arguments, self._of(tool, "execute_kwargs"))
        except ValueError as error:
            return _user_error(str(error))
        except Exception as error:  # noqa: BLE001  the edge: a tool's failure is data
            if isinstance(error, TimeoutError) and deadline.expired():
                text = f"Timed out after {runner.deadline_s:g} s."
                return ToolAnswer(text=text, status=ToolStatus.timeout)
            text = f"{type(error).__name__}: {error}"
            return ToolAnswer(text=text, status=ToolStatus.infra_error)


def check_tools_kwargs(
    tools_kwargs: Mapping[str, Mapping[str, Any] | None], tools: Mapping[str, Tool]
) -> None:
    """Raise `ValueError` for a tool or a kwargs key that does not exist."""
    for name, kwargs in tools_kwargs.items():
        if name not in tools:
            raise ValueError(
                f"tools_kwargs names the tool {name!r}, expected one of {sorted(tools)}; "
                "the dataset and the configured tools do not belong together"
            )
        unknown = sorted(set(kwargs or {}) - set(_KWARGS))
        if unknown:
            raise ValueError(f"tools_kwargs[{name!r}] has {unknown}, expected some of {_KWARGS}")


def _user_error(text: str) -> ToolAnswer:
    return ToolAnswer(text=text, status=ToolStatus.user_error)

"""The run's own tools for an agent: `GET /v1/tools` and `POST /v1/tools/NAME`.

An agent may use them beside or instead of its own, with the limits, the sandboxes and the reward of
the native loop. They are created at the first call. A second instance of an agent, which repeats a
session up to a fork, gets the recorded answers; from the fork on it has a copy of the state there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.clock import TrajectoryClock
from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.gateway.matching import call_key
from mega_agentrl.tool.blocking_calls import call_on_arguments
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.tracing import TrajectorySpans
    from mega_agentrl.types.protocols import ToolSession
    from mega_agentrl.types.records import Prompt, ToolOutcome


class SessionTools:
    """The tools of one session.

    Args:
        context: The shared context of the pass.
        prompt: The prompt, whose `tools_kwargs` the tools get.
        spans: Spans of the trajectory.
        parent: The tools of the trajectory that was forked, at the fork; None for a root.
        clock: Counts the time of the trajectory.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        spans: TrajectorySpans,
        parent: ToolsAtFork | None = None,
        clock: TrajectoryClock | None = None,
    ) -> None:
        self._context = context
        self.clock = clock or TrajectoryClock()
        """Counts the time of the trajectory."""
        self._prompt = prompt
        self._spans = spans
        self._session = parent.session if parent else None
        self._recorded = parent.replay() if parent else {}
        self._outcomes: list[tuple[bytes, ToolOutcome]] = list(parent.outcomes) if parent else []
        self._created = asyncio.Lock()
        self.num_calls = 0
        """Calls that the session has admitted, those answered from the record included."""
        if self._session is not None and not isinstance(self._session, INFRA_ERRORS):
            self._session.watch_waits(self.clock.note_waiting)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Return the outcome of a call, recorded or run now.

        Raises:
            RuntimeError: the tools cannot be created, or could not be copied at the fork.
        """
        key = await call_on_arguments(arguments, call_key, name, arguments)
        recorded = self._recorded.get(key)
        if recorded:
            return recorded.popleft()
        session = await self._open()
        outcome = await self._spans.trace_tool_call(name, session.execute(name, arguments))
        self._outcomes.append((key, outcome))
        return outcome

    @property
    def failure(self) -> str:
        """Answer of the first call that the infrastructure failed; empty if it failed none."""
        failed = (
            outcome.answer
            for _, outcome in self._outcomes
            if outcome.status is ToolStatus.infra_error
        )
        return next(failed, "")

    async def copy_at_fork(self) -> ToolsAtFork:
        """Return the recorded outcomes and a copy of the state; an error takes the copy's place."""
        copy: ToolSession | RuntimeError | OSError | None = None
        if self._session is not None and not isinstance(self._session, INFRA_ERRORS):
            try:
                copy = await self._spans.trace_wait("fork", self._session.fork())
            except INFRA_ERRORS as error:
                copy = error
        return ToolsAtFork(copy, list(self._outcomes))

    async def calc_reward(self) -> dict[str, float]:
        """Return the final reward by tool name; empty if no tool was called.

        Raises:
            RuntimeError, OSError: the tools could not be created, or not be copied at the fork.
        """
        if isinstance(self._session, INFRA_ERRORS):
            raise self._session
        if self._session is None:
            return {}
        return await self._spans.trace_wait("reward", self._session.calc_reward())

    async def release(self) -> None:
        """Free all resources; safe to call twice."""
        session, self._session = self._session, None
        if session is not None and not isinstance(session, INFRA_ERRORS):
            await session.release()

    async def _open(self) -> ToolSession:
        async with self._created:
            if self._session is None:
                session = self._context.tools.open_session()
                session.watch_waits(self.clock.note_waiting)
                create = session.create(self._prompt.tools_kwargs)
                try:
                    await self._spans.trace_wait("tools", create)
                    self._session = session
                except INFRA_ERRORS as error:
                    self._session = error  # no further call acts on tools without a state
        if isinstance(self._session, INFRA_ERRORS):
            raise self._session
        return self._session


class ToolsAtFork:
    """The tools of a session at the point where it was forked.

    Args:
        session: A copy of the state, an error that copying it raised, or None if no tool was
            called before.
        outcomes: Key and outcome of each call before, in order.
    """

    def __init__(
        self,
        session: ToolSession | RuntimeError | OSError | None,
        outcomes: list[tuple[bytes, ToolOutcome]],
    ) -> None:
        self.session = session
        self.outcomes = outcomes

    def replay(self) -> dict[bytes, deque[ToolOutcome]]:
        """Return the outcomes by call."""
        recorded: dict[bytes, deque[ToolOutcome]] = {}
        for key, outcome in self.outcomes:
            recorded.setdefault(key, deque()).append(outcome)
        return recorded

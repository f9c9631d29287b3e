"""All tools of one trajectory: `ports.ToolSession`.

`execute` consumes a parsed call and produces a typed outcome. It waits for a free slot of the
tool, at most `queue_s`, then for the tool, at most its deadline; unblocked by the answer, by
either limit, or by cancellation. This is the one place where whatever a tool raises becomes an
outcome: arguments that do not fit the schema and `ValueError` are the policy's (`user_error`),
the deadline is `timeout`, anything else is ours (`infra_error`). Nothing is run twice here. What
a tool says is untrusted and leaves here escaped.

`create`, `fork`, `calc_reward` and `release` wait at most `lifecycle_s` for each tool and raise
`ToolFault` where one fails. States made before a failure or a cancellation are released, and so
is one that arrives too late. Sessions are independent. Calls of one session may run at once:
those to one tool take turns in the order they came, unless it keeps no state (`create` gave
None).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.tool.deadline import DeadlinePassedError, within
from mega_agentrl.tool.protocol import ToolAnswer
from mega_agentrl.types.faults import ToolFault
from mega_agentrl.types.records import ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from mega_agentrl.tool.protocol import Tool
    from mega_agentrl.tool.schema import FunctionSchema
    from mega_agentrl.tool.slots import Slots

ResultT = TypeVar("ResultT")

MAX_METRICS = 32
MAX_ANSWER_CHARS = 1 << 20
"""What a tool says beyond is cut: no context takes it, and escaping it would hold up everybody."""

_METRIC = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class Installed:
    """A tool of the run with its checked schema and its slots, shared by all sessions."""

    tool: Tool
    schema: FunctionSchema
    slots: Slots


@dataclass(slots=True, kw_only=True, frozen=True)
class SessionLimits:
    """lifecycle_s: of one create, fork, calc_reward or release. queue_s: wait for a slot."""

    lifecycle_s: float = 60.0
    queue_s: float = 600.0


class TrajectoryTools:
    """A session over the run's tools; `create` chooses which of them this prompt gets.

    escape: makes what a tool says harmless, before anybody sees it.
    """

    def __init__(
        self, tools: Mapping[str, Installed], limits: SessionLimits, escape: Callable[[str], str]
    ) -> None:
        self._tools = tools
        self._limits = limits
        self._escape = escape
        self._kwargs: Mapping[str, Mapping[str, Any]] = {}
        self._states: dict[str, Any] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def create(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the state of the tools named in `tools_kwargs`; of all where it is empty.

        A name with the value None is left out: that is how a parquet column of structs reads
        where a row lacks the key. Raises `ValueError` for an unknown tool or kwargs key,
        `ToolFault` for a tool that fails.
        """
        wanted = {name: value for name, value in tools_kwargs.items() if value is not None}
        check_tools_kwargs(wanted, self._tools)
        self._kwargs = wanted
        try:
            for name in wanted or self._tools:
                work = self._tools[name].tool.create(self._of(name, "create_kwargs"))
                self._states[name] = await self._make(name, "create", work)
        except BaseException:
            with suppress(ToolFault):
                await self.release()
            raise

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run one call to a typed outcome; raises only cancellation."""
        begin = time.monotonic()
        if tool not in self._states:
            there = ", ".join(sorted(self._states)) or "none"
            text = self._escape(f"Tool({tool}) is not available; there is {there}.")
            return _no_run(tool, text, bad_call=True)
        installed = self._tools[tool]
        try:
            given = installed.schema.read(arguments)
        except ValueError as error:
            return _no_run(tool, self._escape(str(error)), bad_call=True)
        if self._states[tool] is None:
            return await self._run(installed, given, begin)
        turn = self._turns[tool]
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await turn.acquire()
        except TimeoutError:
            text = f"an earlier call was not done within {self._limits.queue_s:g} s"
            return _no_run(tool, text, ToolStatus.infra_error, queue_s=self._limits.queue_s)
        try:
            return await self._run(installed, given, begin)
        finally:
            turn.release()

    async def _run(
        self, installed: Installed, given: Mapping[str, Any], begin: float
    ) -> ToolOutcome:
        """begin: when the call came, on the monotonic clock."""
        tool = installed.tool.name
        try:
            await installed.slots.take(self._limits.queue_s)
        except TimeoutError:
            text = f"no slot of {installed.tool.max_concurrent} free in {self._limits.queue_s:g} s"
            return _no_run(tool, text, ToolStatus.infra_error, queue_s=self._limits.queue_s)
        start = time.monotonic()
        answer = await self._answer(installed, self._states[tool], given)
        return ToolOutcome(
            tool=tool,
            status=answer.status,
            answer=self._escape(answer.text),
            latency_s=time.monotonic() - start,
            queue_s=start - begin,
            step_reward=answer.step_reward,
            metrics=answer.metrics,
        )

    async def fork(self) -> TrajectoryTools:
        """A session whose tools' states are copies; raises `ToolFault` for one that fails."""
        child = TrajectoryTools(self._tools, self._limits, self._escape)
        child._kwargs = self._kwargs
        try:
            for name, state in self._states.items():
                work = self._tools[name].tool.fork(state)
                child._states[name] = await self._make(name, "fork", work)
        except BaseException:
            with suppress(ToolFault):
                await child.release()
            raise
        return child

    async def calc_reward(self) -> dict[str, float]:
        """Final reward by tool; tools that give none are left out.

        Raises `ToolFault` for a tool that fails or gives no finite number.
        """
        rewards: dict[str, float] = {}
        for name, state in self._states.items():
            work = self._tools[name].tool.calc_reward(state, self._of(name, "calc_reward_kwargs"))
            reward = await self._step(name, "calc_reward", work)
            if reward is None:
                continue
            if not _is_finite(reward):
                raise _fault(name, "calc_reward", f"got {reward!r}, expected a finite number")
            rewards[name] = float(reward)
        return rewards

    async def release(self) -> None:
        """Free every state, whatever happens meanwhile; a second call does nothing.

        Raises `ToolFault` for the first tool that failed at it, after all have been asked.
        """
        states, self._states = self._states, {}
        if not states:
            return
        work = [self._release_one(name, state) for name, state in states.items()]
        releasing = asyncio.gather(*work, return_exceptions=True)
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            # It has deadlines of its own; leaving now would leave sandboxes behind.
            await asyncio.wait({releasing})
            raise
        for error in releasing.result():
            if isinstance(error, BaseException):
                raise error

    def _of(self, name: str, key: str) -> Mapping[str, Any]:
        return self._kwargs.get(name, {}).get(key) or {}

    async def _release_one(self, name: str, state: Any) -> None:
        work = self._tools[name].tool.release(state, self._of(name, "release_kwargs"))
        await self._step(name, "release", work)

    async def _make(self, name: str, step: str, work: Coroutine[Any, Any, Any]) -> Any:
        """A new state; one that comes too late is released."""

        async def undo(state: Any) -> None:
            await self._release_one(name, state)

        return await self._step(name, step, work, undo)

    async def _step(
        self,
        name: str,
        step: str,
        work: Coroutine[Any, Any, ResultT],
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
    ) -> ResultT:
        begin = time.monotonic()
        try:
            return await within(work, self._limits.lifecycle_s, undo=undo)
        except DeadlinePassedError as error:
            raise _fault(name, step, str(error), time.monotonic() - begin) from error
        except Exception as error:  # the edge: a tool's failure is data
            _log.warning("tool %s: %s failed", name, step, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            raise _fault(name, step, text, time.monotonic() - begin) from error

    async def _answer(
        self, installed: Installed, state: Any, arguments: Mapping[str, Any]
    ) -> ToolAnswer:
        tool = installed.tool
        work = tool.execute(state, arguments, self._of(tool.name, "execute_kwargs"))
        try:
            answer = await within(work, tool.deadline_s, on_end=installed.slots.give)
            return _checked(answer, tool.name)
        except DeadlinePassedError:
            text = f"Timed out after {tool.deadline_s:g} s."
            return ToolAnswer(text=text, status=ToolStatus.timeout)
        except ValueError as error:
            return ToolAnswer(text=str(error), status=ToolStatus.user_error)
        except Exception as error:  # noqa: BLE001  the edge: a tool's failure is data
            _log.warning("tool %s: execute failed", tool.name, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            return ToolAnswer(text=text, status=ToolStatus.infra_error)


def check_tools_kwargs(
    tools_kwargs: Mapping[str, Mapping[str, Any] | None], tools: Mapping[str, Installed]
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


def _checked(answer: ToolAnswer, name: str) -> ToolAnswer:
    """The answer without metrics that cannot be written; raises `TypeError` for a broken one."""
    if not isinstance(answer, ToolAnswer) or not isinstance(answer.text, str):
        raise TypeError(f"execute returned {type(answer).__name__}, expected a ToolAnswer of text")
    if not _is_finite(answer.step_reward):
        raise TypeError(f"step_reward is {answer.step_reward!r}, expected a finite number")
    # Names may come from what the tool has read: only plain ones reach the metrics.
    kept = {
        key: float(value)
        for key, value in answer.metrics.items()
        if isinstance(key, str) and _METRIC.fullmatch(key) and _is_finite(value)
    }
    if len(kept) < len(answer.metrics) or len(kept) > MAX_METRICS:
        _log.warning("tool %s: metrics with odd names or values were dropped", name)
    text = answer.text
    if len(text) > MAX_ANSWER_CHARS:
        text = f"{text[:MAX_ANSWER_CHARS]}... [cut]"
    return ToolAnswer(
        text=text,
        status=answer.status,
        step_reward=float(answer.step_reward),
        metrics=dict(sorted(kept.items())[:MAX_METRICS]),
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _no_run(
    tool: str,
    text: str,
    status: ToolStatus = ToolStatus.user_error,
    *,
    queue_s: float = 0.0,
    bad_call: bool = False,
) -> ToolOutcome:
    return ToolOutcome(
        tool=tool, status=status, answer=text, latency_s=0.0, queue_s=queue_s, bad_call=bad_call
    )


def _fault(name: str, step: str, text: str, latency_s: float = 0.0) -> ToolFault:
    return ToolFault(
        ToolOutcome(
            tool=name,
            status=ToolStatus.infra_error,
            answer=f"{step}: {text}",
            latency_s=latency_s,
        )
    )

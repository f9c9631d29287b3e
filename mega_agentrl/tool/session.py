"""The tools of one trajectory: implements `types.protocols.ToolSession`.

`TrajectoryToolSession.execute` turns a parsed call into a typed outcome. It waits at most
`queue_timeout_s` for a free slot of the tool, then at most the tool's timeout. Exceptions of tools
become outcomes only here: arguments that do not fit the schema and `ToolInputError` are errors of
the policy (`user_error`), a missed deadline is a `timeout`, anything else is an `infra_error`.
Nothing is run twice. A tool's text is untrusted and is escaped here.

If all first calls of a method of a user's tool raise, the run ends (`types.first_calls`).

`create`, `fork`, `calc_reward` and `release` wait at most `lifecycle_timeout_s` (the tool's or the
session's) for each tool and raise `ToolSessionError` if one fails. States created before a failure
or cancellation are released, and so is a state that arrives too late. Sessions are independent.
Calls of one session may run concurrently; calls to one tool take turns in order of arrival, unless
the tool keeps no state (`create` returned None) or says that they need not (`takes_turns`). Tools
of one `state_group` share a state and these turns; the first of them in the session creates, copies
and releases it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import ToolInputError, ToolResponse
from mega_agentrl.tool.blocking_calls import call_on_arguments
from mega_agentrl.tool.deadline import DeadlineExceededError, run_with_deadline
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.first_calls import FirstCalls, last_traceback_line
from mega_agentrl.types.records import ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence

    from mega_agentrl.tool.base import Tool
    from mega_agentrl.tool.function_schema import FunctionSchema
    from mega_agentrl.types.images import ImageInput

ResultT = TypeVar("ResultT")

METHODS = ("create", "execute", "fork", "calc_reward", "release")
"""Methods of a tool that a session calls."""

_UNWATCHED = FirstCalls("", "", 0)

MAX_METRICS = 32
MAX_RESPONSE_CHARS = 1 << 20
"""Longer responses are cut: no context could hold them, and escaping them would block the loop."""

_METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KWARGS_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class RegisteredTool:
    """A tool of the run with its validated schema and its slots, shared by all sessions."""

    tool: Tool
    schema: FunctionSchema
    """Its validated schema."""
    slots: asyncio.Semaphore
    """One slot for each concurrent execution; first come, first served."""
    first_calls: Mapping[str, FirstCalls]
    """Watchers by method (`METHODS`) of a user's tool; empty for a built-in tool, whose failures
    are those of sandboxes and services."""

    def watch(self, method: str) -> FirstCalls:
        """Return the watcher of a method's first calls."""
        return self.first_calls.get(method) or _UNWATCHED


@dataclass(slots=True, kw_only=True, frozen=True)
class SessionLimits:
    """Time limits of a session."""

    lifecycle_timeout_s: float = 60.0
    """Limit of one create, fork, calc_reward or release of a tool that sets none itself."""
    queue_timeout_s: float = 600.0
    """Limit of the wait for a free slot of a tool."""


class TrajectoryToolSession:
    """A session over the run's tools; `create` chooses which of them the prompt gets.

    `escape` escapes control tags in a tool's text before anything else reads it.
    """

    def __init__(
        self,
        tools: Mapping[str, RegisteredTool],
        limits: SessionLimits,
        escape: Callable[[str], str],
    ) -> None:
        self._tools = tools
        self._limits = limits
        self._escape = escape
        self._kwargs: Mapping[str, Mapping[str, Any]] = {}
        self._states: dict[str, Any] = {}
        self._owners: dict[str, str] = {}
        self._images: tuple[ImageInput, ...] = ()
        self._tool_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._num_calls: Counter[bool] = Counter()
        """Calls under way, by whether they wait for the run."""
        self._num_slots: Counter[str] = Counter()
        """Slots that calls of this session hold, by tool; a thread may hold one after its call."""
        self._on_wait: Callable[[bool], None] | None = None

    def watch_waits(self, on_change: Callable[[bool], None]) -> None:
        """Call `on_change` when all calls under way begin or cease to wait for the run."""
        self._on_wait = on_change

    async def create(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the state of the tools named in `tools_kwargs`, of all tools if it is empty.

        A name with the value None is left out: parquet returns None for the members of a struct
        that a row lacks.

        Raises:
            ValueError: an unknown tool or kwargs key.
            ToolSessionError: a tool failed.
        """
        prompt_kwargs = {name: value for name, value in tools_kwargs.items() if value is not None}
        check_tools_kwargs(prompt_kwargs, self._tools)
        self._kwargs = prompt_kwargs
        self._owners = self._state_owners(prompt_kwargs or self._tools)
        try:
            for name, owner in self._owners.items():
                if owner != name:
                    self._states[name] = self._states[owner]
                    continue
                work = self._tools[name].tool.create(self._group_kwargs(name, "create_kwargs"))
                with self._counting(waits=True):
                    self._states[name] = await self._create_state(name, "create", work)
        except BaseException:
            with suppress(ToolSessionError):
                await self.release()
            raise

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run one call and return its typed outcome; raises only cancellation."""
        arrival_time = time.monotonic()
        if tool not in self._states:
            names = ", ".join(sorted(self._states)) or "none"
            text = self._escape(f"Tool({tool}) is not available; available tools: {names}.")
            return _outcome_without_run(tool, text, is_invalid_call=True)
        registered = self._tools[tool]
        try:
            check = registered.schema.validate_arguments
            checked_arguments = await call_on_arguments(arguments, check, arguments)
        except ToolInputError as error:
            return _outcome_without_run(tool, self._escape(str(error)), is_invalid_call=True)
        except Exception as error:  # noqa: BLE001  a schema of others can make the check fail
            _log.warning("tool %s: its schema cannot be checked", tool, exc_info=error)
            text = self._escape(f"its schema cannot be checked: {type(error).__name__}: {error}")
            return _outcome_without_run(tool, text, ToolStatus.infra_error)
        if self._states[tool] is None or not registered.tool.takes_turns:
            return await self._run_limited(registered, checked_arguments, arrival_time)
        lock = self._tool_locks[self._owners[tool]]
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                await lock.acquire()
        except TimeoutError:
            # The policy has made the earlier call, and chooses how long it runs.
            text = f"an earlier call was not done within {self._limits.queue_timeout_s:g} s"
            return _outcome_without_run(
                tool, text, ToolStatus.timeout, queue_s=self._limits.queue_timeout_s
            )
        try:
            return await self._run_limited(registered, checked_arguments, arrival_time)
        finally:
            lock.release()

    async def _run_limited(
        self, registered: RegisteredTool, checked_arguments: Mapping[str, Any], arrival_time: float
    ) -> ToolOutcome:
        """Run a validated call once a slot is free; `arrival_time` is on the monotonic clock."""
        tool = registered.tool.name
        try:
            with self._counting(waits=True):
                async with asyncio.timeout(self._limits.queue_timeout_s):
                    await registered.slots.acquire()
        except TimeoutError:
            limit = registered.tool.max_concurrent
            text = f"none of the {limit} slots became free in {self._limits.queue_timeout_s:g} s"
            # It is the policy's doing that calls of its own hold slots.
            status = ToolStatus.timeout if self._num_slots[tool] else ToolStatus.infra_error
            return _outcome_without_run(tool, text, status, queue_s=self._limits.queue_timeout_s)
        self._num_slots[tool] += 1
        start = time.monotonic()
        with self._counting(waits=False):
            response = await self._execute_tool(registered, self._states[tool], checked_arguments)
        return ToolOutcome(
            tool=tool,
            status=response.status,
            answer=self._escape(response.text),
            latency_s=time.monotonic() - start,
            queue_s=start - arrival_time,
            step_reward=response.step_reward,
            metrics=response.metrics,
            images=response.images,
        )

    @contextmanager
    def _counting(self, *, waits: bool) -> Iterator[None]:
        """Count what happens inside as a call that waits for the run, or as one that runs."""
        self._add_calls(waits, 1)
        try:
            yield
        finally:
            self._add_calls(waits, -1)

    def _add_calls(self, waits: bool, number: int) -> None:
        self._num_calls[waits] += number
        if self._on_wait is not None:
            self._on_wait(self._num_calls[True] > 0 and not self._num_calls[False])

    def _give_slot_back(self, registered: RegisteredTool) -> None:
        self._num_slots[registered.tool.name] -= 1
        registered.slots.release()

    def show_images(self, images: Sequence[ImageInput]) -> None:
        """Add images that the policy has been shown to those of tools with `reads_images`."""
        self._images += tuple(images)

    async def fork(self) -> TrajectoryToolSession:
        """Return a session with copies of the tools' states; raises `ToolSessionError`."""
        child = TrajectoryToolSession(self._tools, self._limits, self._escape)
        child._kwargs, child._owners, child._images = self._kwargs, self._owners, self._images
        try:
            for name, state in self._states.items():
                if (owner := self._owners[name]) != name:
                    child._states[name] = child._states[owner]
                    continue
                work = self._tools[name].tool.fork(state)
                child._states[name] = await self._create_state(name, "fork", work)
        except BaseException:
            with suppress(ToolSessionError):
                await child.release()
            raise
        return child

    async def calc_reward(self) -> dict[str, float]:
        """Return the final reward by tool; tools that give none are left out.

        Raises:
            ToolSessionError: a tool failed or returned a number that is not finite.
        """
        rewards: dict[str, float] = {}
        for name, state in self._owned_states().items():
            work = self._tools[name].tool.calc_reward(
                state, self._group_kwargs(name, "calc_reward_kwargs")
            )
            reward = await self._run_lifecycle_step(name, "calc_reward", work)
            if reward is None:
                continue
            if not _is_finite(reward):
                raise _tool_fault(name, "calc_reward", f"got {reward!r}, expected a finite number")
            rewards[name] = float(reward)
        return rewards

    async def release(self) -> None:
        """Release every state, even when cancelled; a second call does nothing.

        Raises:
            ToolSessionError: a tool failed; raised after all tools have been asked.
        """
        states, self._states = self._owned_states(), {}
        if not states:
            return
        work = [self._release_tool(name, state) for name, state in states.items()]
        releasing = asyncio.gather(*work, return_exceptions=True)
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            # Release has its own timeouts; returning now would leave sandboxes open.
            await asyncio.wait({releasing})
            raise
        for error in releasing.result():
            if isinstance(error, BaseException):
                raise error

    def _kwargs_for(self, name: str, key: str) -> Mapping[str, Any]:
        return self._kwargs.get(name, {}).get(key) or {}

    def _state_owners(self, names: Iterable[str]) -> dict[str, str]:
        """Return the first tool of each tool's state group by the name of the tool."""
        first: dict[object, str] = {}
        owners = {}
        for name in names:
            group = self._tools[name].tool.state_group
            owners[name] = name if group is None else first.setdefault(group, name)
        return owners

    def _owned_states(self) -> dict[str, Any]:
        """Return each state once, by the tool that manages it."""
        return {name: state for name, state in self._states.items() if self._owners[name] == name}

    def _group_kwargs(self, owner: str, key: str) -> dict[str, Any]:
        """Return the kwargs of all tools whose state the owner manages."""
        merged: dict[str, Any] = {}
        for name, name_of_owner in self._owners.items():
            if name_of_owner == owner:
                merged |= self._kwargs_for(name, key)
        return merged

    async def _release_tool(self, name: str, state: Any) -> None:
        work = self._tools[name].tool.release(state, self._group_kwargs(name, "release_kwargs"))
        await self._run_lifecycle_step(name, "release", work)

    async def _create_state(self, name: str, step: str, work: Coroutine[Any, Any, Any]) -> Any:
        """Return a new state; a state that comes after the deadline is released."""

        async def undo(state: Any) -> None:
            await self._release_tool(name, state)

        return await self._run_lifecycle_step(name, step, work, undo)

    async def _run_lifecycle_step(
        self,
        name: str,
        step: str,
        work: Coroutine[Any, Any, ResultT],
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
    ) -> ResultT:
        start = time.monotonic()
        first_calls = self._tools[name].watch(step)
        call = first_calls.start()
        try:
            timeout_s = self._tools[name].tool.lifecycle_timeout_s
            limit_s = self._limits.lifecycle_timeout_s if timeout_s is None else timeout_s
            result = await run_with_deadline(work, limit_s, undo=undo)
        except DeadlineExceededError as error:
            first_calls.record_no_outcome(call)
            raise _tool_fault(name, step, str(error), time.monotonic() - start) from error
        except asyncio.CancelledError:
            first_calls.record_no_outcome(call)
            raise
        except Exception as error:  # a tool may raise anything: its failure is data
            _log.warning("tool %s: %s failed", name, step, exc_info=error)
            text = f"{type(error).__name__}: {error}"
            first_calls.record_failure(call, text, last_traceback_line(error))
            raise _tool_fault(name, step, text, time.monotonic() - start) from error
        first_calls.record_success()
        return result

    async def _execute_tool(
        self, registered: RegisteredTool, state: Any, arguments: Mapping[str, Any]
    ) -> ToolResponse:
        tool = registered.tool
        kwargs = self._kwargs_for(tool.name, "execute_kwargs")
        if tool.reads_images:
            kwargs = {**kwargs, "images": self._images}
        work = tool.execute(state, arguments, kwargs)
        first_calls = registered.watch("execute")
        call = first_calls.start()
        give_back = partial(self._give_slot_back, registered)
        try:
            response = _validate_response(
                await run_with_deadline(work, tool.timeout_s, on_end=give_back),
                tool.name,
            )
        except DeadlineExceededError:
            first_calls.record_no_outcome(call)
            text = f"Timed out after {tool.timeout_s:g} s."
            return ToolResponse(text=text, status=ToolStatus.timeout)
        except ToolInputError as error:
            first_calls.record_no_outcome(call)
            return ToolResponse(text=str(error), status=ToolStatus.user_error)
        except asyncio.CancelledError:
            first_calls.record_no_outcome(call)
            raise
        except Exception as error:  # noqa: BLE001  a tool may raise anything: its failure is data
            _log.warning("tool %s: execute failed%s", tool.name, _blame_hint(error), exc_info=error)
            text = f"{type(error).__name__}: {error}"
            first_calls.record_failure(call, text, last_traceback_line(error))
            return ToolResponse(text=text, status=ToolStatus.infra_error)
        first_calls.record_success()
        return response


def check_tools_kwargs(
    tools_kwargs: Mapping[str, Mapping[str, Any] | None], tools: Mapping[str, RegisteredTool]
) -> None:
    """Raise `ValueError` for a tool or a kwargs key that does not exist."""
    for name, kwargs in tools_kwargs.items():
        if name not in tools:
            cause = "the dataset was made for other tools"
            raise InputError("tools_kwargs", name, f"one of the tools {sorted(tools)}", cause)
        unknown = sorted(set(kwargs or {}) - set(_KWARGS_KEYS))
        if unknown:
            raise InputError(f"tools_kwargs[{name!r}]", unknown, f"some of {_KWARGS_KEYS}")


def _validate_response(response: ToolResponse, name: str) -> ToolResponse:
    """Return the response without invalid metrics; raises `TypeError` for an invalid response."""
    if not isinstance(response, ToolResponse) or not isinstance(response.text, str):
        raise TypeError(
            f"execute returned {type(response).__name__}, expected a ToolResponse with text"
        )
    images = response.images
    if not isinstance(images, tuple | list) or not all(isinstance(item, bytes) for item in images):
        raise TypeError(f"images is {images!r:.100}, expected a tuple of the bytes of image files")
    if not _is_finite(response.step_reward):
        raise TypeError(f"step_reward is {response.step_reward!r}, expected a finite number")
    # Metric names may come from untrusted text: only plain ones are kept.
    metrics = {
        key: float(value)
        for key, value in response.metrics.items()
        if isinstance(key, str) and _METRIC_NAME.fullmatch(key) and _is_finite(value)
    }
    if len(metrics) < len(response.metrics) or len(metrics) > MAX_METRICS:
        _log.warning("tool %s: metrics with invalid names or values were dropped", name)
    text = response.text
    if len(text) > MAX_RESPONSE_CHARS:
        text = f"{text[:MAX_RESPONSE_CHARS]}... [cut]"
    return ToolResponse(
        text=text,
        status=response.status,
        step_reward=float(response.step_reward),
        metrics=dict(sorted(metrics.items())[:MAX_METRICS]),
        images=tuple(images),
    )


def _blame_hint(error: Exception) -> str:
    """Return what to raise in place of a `ValueError` that is meant for the policy."""
    if type(error) is not ValueError:
        return ""
    return "; if the policy's arguments are at fault, raise mega_agentrl.tool.base.ToolInputError"


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _outcome_without_run(
    tool: str,
    text: str,
    status: ToolStatus = ToolStatus.user_error,
    *,
    queue_s: float = 0.0,
    is_invalid_call: bool = False,
) -> ToolOutcome:
    return ToolOutcome(
        tool=tool,
        status=status,
        answer=text,
        latency_s=0.0,
        queue_s=queue_s,
        is_invalid_call=is_invalid_call,
    )


def _tool_fault(name: str, step: str, text: str, latency_s: float = 0.0) -> ToolSessionError:
    return ToolSessionError(
        ToolOutcome(
            tool=name,
            status=ToolStatus.infra_error,
            answer=f"{step}: {text}",
            latency_s=latency_s,
        )
    )

"""Sessions of simulated users: one per trajectory, with timeouts on every call.

Each call waits for the interaction for at most its `timeout_s`. Exceptions and timeouts become a
`ToolSessionError`: they are infrastructure failures, never the policy's fault. The caller decides
whether an answer fits into the context and whether it ends the trajectory.
"""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.interaction.base import Interaction, Reply, load_interactions
from mega_agentrl.tool.deadline import DeadlineExceededError, run_with_deadline
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from mega_agentrl.types.records import Message, Prompt

ResultT = TypeVar("ResultT")


class InteractionRegistry:
    """The interactions of a run by name; implements `InteractionProvider`."""

    def __init__(self, interactions: Sequence[Interaction]) -> None:
        self._by_name = {interaction.name: interaction for interaction in interactions}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all interactions."""
        return tuple(self._by_name)

    def open_session(self, prompt: Prompt) -> TrajectoryInteractionSession | None:
        """Open a session for a trajectory of the prompt, or return None if it uses none.

        The caller must call `create` on the session.

        Raises:
            ValueError: The prompt names no interaction or an unknown one.
        """
        kwargs = prompt.extra_info.get("interaction_kwargs")
        if kwargs is None or not self._by_name:
            return None
        default = next(iter(self._by_name)) if len(self._by_name) == 1 else None
        name = kwargs.get("name", default)
        if name not in self._by_name:
            raise InputError(
                f"prompt {prompt.prompt_id}: interaction_kwargs.name",
                name,
                f"one of {sorted(self._by_name)}",
                "the dataset was made for other interactions",
            )
        create_kwargs = {key: value for key, value in kwargs.items() if key != "name"}
        return TrajectoryInteractionSession(self._by_name[name], create_kwargs)

    def check_prompt_kwargs(self, prompts: Iterable[Prompt]) -> None:
        """Raise `ValueError` for the first prompt with invalid `interaction_kwargs`."""
        for prompt in prompts:
            session = self.open_session(prompt)
            if session is None:
                continue
            try:
                session.check_kwargs()
            except ValueError as error:
                expected = "what the interaction accepts"
                name = f"prompt {prompt.prompt_id}: interaction_kwargs"
                got = prompt.extra_info["interaction_kwargs"]
                raise InputError(name, got, expected, str(error)) from error


def load_interaction_registry(path: str, tool_names: Iterable[str]) -> InteractionRegistry:
    """Load the interactions of a yaml file; an empty `path` gives an empty registry.

    Args:
        path: `rollout.interaction_config_file`.
        tool_names: Names of the tools, which interactions must not have.

    Raises:
        ValueError: The file is invalid or a name is that of a tool.
    """
    registry = InteractionRegistry(load_interactions(path) if path else ())
    if duplicates := sorted(set(registry.names) & set(tool_names)):
        expected = "names that no tool has, because rewards are reported by name"
        cause = f"there are tools called {', '.join(duplicates)}"
        raise ConfigError("rollout.interaction_config_file", path, expected, cause)
    return registry


class TrajectoryInteractionSession:
    """A user simulator session over one interaction; implements `InteractionSession`."""

    def __init__(self, interaction: Interaction, kwargs: Mapping[str, Any]) -> None:
        self.name = interaction.name
        self._num_responses = 0
        self._interaction = interaction
        self._kwargs = kwargs
        self._state: Any = None
        self._is_open = False

    @property
    def can_respond(self) -> bool:
        """Whether the interaction may send another message."""
        return self._num_responses < self._interaction.max_turns

    @property
    def can_fork(self) -> bool:
        """Whether the trajectory may branch."""
        return self._interaction.can_fork(self._state)

    def check_kwargs(self) -> None:
        """Raise `ValueError` if the prompt's kwargs are invalid."""
        self._interaction.check_kwargs(self._kwargs)

    async def create(self) -> None:
        """Create the state."""
        work = self._interaction.create(self._kwargs)
        self._state, _ = await self._call_with_timeout("create", work, self._interaction.release)
        self._is_open = True

    async def respond(self, messages: Sequence[Message]) -> tuple[ToolOutcome, bool]:
        """Return the answer as an outcome, and whether it ends the conversation."""
        work = self._interaction.respond(self._state, messages)
        reply, latency_s = await self._call_with_timeout("respond", work)
        if not isinstance(reply, Reply) or not isinstance(reply.text, str):
            raise self._make_error(
                "respond", f"got {type(reply).__name__}, expected a Reply of text"
            )
        self._check_reward("respond", reply.reward)
        outcome = ToolOutcome(
            tool=self.name,
            status=ToolStatus.ok,
            answer=reply.text,
            latency_s=latency_s,
            step_reward=float(reply.reward),
        )
        return outcome, reply.is_last

    def record_response(self) -> None:
        """Count an answer that was passed on to the policy."""
        self._num_responses += 1

    async def fork(self) -> TrajectoryInteractionSession:
        """Return an independent copy of the session; requires `can_fork`."""
        child = TrajectoryInteractionSession(self._interaction, self._kwargs)
        child._num_responses = self._num_responses
        if self._state is not None:
            work = self._interaction.fork(self._state)
            child._state, _ = await self._call_with_timeout("fork", work, self._interaction.release)
        child._is_open = True
        return child

    async def calc_reward(self) -> dict[str, float]:
        """Return the final reward by the interaction's name; empty if there is none."""
        reward, _ = await self._call_with_timeout(
            "calc_reward", self._interaction.calc_reward(self._state)
        )
        if reward is None:
            return {}
        self._check_reward("calc_reward", reward)
        return {self.name: float(reward)}

    async def release(self) -> None:
        """Free the state; safe to call twice."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            await self._call_with_timeout("release", self._interaction.release(self._state))

    async def _call_with_timeout(
        self,
        step: str,
        work: Coroutine[Any, Any, ResultT],
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
    ) -> tuple[ResultT, float]:
        """Await `work` within the timeout; return its result and duration in seconds."""
        begin = time.monotonic()
        try:
            result = await run_with_deadline(work, self._interaction.timeout_s, undo=undo)
        except DeadlineExceededError as error:
            raise self._make_error(step, str(error), time.monotonic() - begin) from error
        except Exception as error:  # user code may raise anything
            text = f"{type(error).__name__}: {error}"
            raise self._make_error(step, text, time.monotonic() - begin) from error
        return result, time.monotonic() - begin

    def _check_reward(self, step: str, value: object) -> None:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise self._make_error(step, f"got the reward {value!r}, expected a finite number")

    def _make_error(self, step: str, text: str, latency_s: float = 0.0) -> ToolSessionError:
        outcome = ToolOutcome(
            tool=self.name,
            status=ToolStatus.infra_error,
            answer=f"{step}: {text}",
            latency_s=latency_s,
        )
        return ToolSessionError(outcome)

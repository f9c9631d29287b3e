"""Plays an environment with `reset` and `step` against the gateway, turn by turn.

Each observation is a message of the user, each message of the policy is parsed to an action. The
reward of the attempt is the sum of the rewards of its steps. The attempt ends when the environment
says so, or when the policy has used up its tokens or turns; both are ordinary ends. A message that
is no action costs a turn: the policy reads why, and the environment does not step.

Whatever the environment raises, and a call that exceeds its time limit, is an
`EnvironmentFailedError`: the attempt is masked and in no baseline.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.ranges import MAX_TIMEOUT_S
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.rollout.agents.base import EnvironmentFailedError
from mega_agentrl.tool.deadline import run_with_deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from types import ModuleType

    from mega_agentrl.rollout.agents.base import AgentTask

KEY = "rollout.agent"
DEFAULT_STEP_TIMEOUT_S = 60.0


_LIMIT_CODES = ("budget_spent", "context_length_exceeded")
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class Observation:
    """The answer of an environment to `reset` or `step`."""

    text: str
    """Text that the policy reads."""
    reward: float = 0.0
    """Reward of the step."""
    is_last: bool = False
    """Whether the episode has ended."""


class TextEnvironment(Protocol):
    """The environment of one attempt."""

    async def reset(self) -> Observation:
        """Start the episode and return the first observation."""

    def parse(self, message: str) -> Any:
        """Return the action of a message of the policy.

        Raises:
            ValueError: The message contains none; the policy reads the error.
        """

    async def step(self, action: Any) -> Observation:
        """Take an action."""

    async def close(self) -> None:
        """Release the environment; also called after a failure."""


async def play(task: AgentTask, environment: TextEnvironment, step_timeout_s: float) -> float:
    """Play one attempt and return the sum of its rewards.

    Args:
        task: The attempt. Its environment is reset, stepped and closed here.
        environment: The environment.
        step_timeout_s: Time limit of each call of the environment.

    Raises:
        EnvironmentFailedError: The environment raised an error or exceeded the limit.
        RuntimeError: The gateway refused a request.
    """
    messages: list[Any] = list(task.prompt)
    rewards: list[float] = []
    try:
        observation = await guard(environment.reset(), step_timeout_s, "reset")
        async with _open_session(task) as http:
            while not observation.is_last:
                messages.append({"role": "user", "content": observation.text})
                answer = await _ask(http, f"{task.base_url}/chat/completions", messages)
                if answer is None:
                    break
                messages.append(answer)
                observation = await _act(environment, answer.get("content") or "", step_timeout_s)
                rewards.append(observation.reward)
    finally:
        await _close(environment, step_timeout_s)
    return math.fsum(rewards)


async def guard(work: Coroutine[Any, Any, Observation], timeout_s: float, name: str) -> Observation:
    """Return the observation of a call of the environment.

    Raises:
        EnvironmentFailedError: It raised an error, took too long, or its reward is not finite.
    """
    try:
        observation = await run_with_deadline(_without_exit(work), timeout_s)
    except Exception as error:
        raise EnvironmentFailedError(f"{name}: {type(error).__name__}: {error}") from error
    if not math.isfinite(observation.reward):
        raise EnvironmentFailedError(f"{name}: got the reward {observation.reward}")
    return observation


async def _without_exit[ResultT](work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work`; an exit that it asks for ends the attempt, not the run."""
    try:
        return await work
    except SystemExit as error:
        raise EnvironmentFailedError(f"SystemExit: {error}") from error


async def _act(environment: TextEnvironment, message: str, timeout_s: float) -> Observation:
    try:
        action = environment.parse(message)
    except ValueError as error:
        return Observation(text=f"Invalid action: {error}")
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(f"parse: {type(error).__name__}: {error}") from error
    return await guard(environment.step(action), timeout_s, "step")


async def _close(environment: TextEnvironment, timeout_s: float) -> None:
    """Close the environment. Its failure does not change a reward that is complete."""
    try:
        await run_with_deadline(_without_exit(environment.close()), timeout_s)
    except Exception as error:  # noqa: BLE001  the code of others may raise anything
        _log.warning("an environment could not be closed: %s: %s", type(error).__name__, error)


def _open_session(task: AgentTask) -> aiohttp.ClientSession:
    # The runner bounds the duration of an attempt.
    return aiohttp.ClientSession(
        headers={"authorization": f"Bearer {task.api_key}"}, timeout=aiohttp.ClientTimeout(None)
    )


async def _ask(http: aiohttp.ClientSession, url: str, messages: list[Any]) -> dict[str, Any] | None:
    """Return the policy's next message, None if it was cut off because a limit is reached."""
    async with http.post(url, json={"model": "policy", "messages": messages}) as response:
        body = await response.json()
    if response.status != 200:
        if body["error"]["code"] in _LIMIT_CODES:
            return None
        raise RuntimeError(f"the gateway refused a request: {body['error']['message']}")
    choice = body["choices"][0]
    message: dict[str, Any] = choice["message"]
    return None if choice["finish_reason"] == "length" else message


def import_package(module: str, requirement: str) -> ModuleType:
    """Import the module of a package that the adapter needs.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{KEY}._target_",
            module,
            f"an installed package: pip install {requirement}",
            f"{type(error).__name__}: {error}",
        ) from error


def load_option(reference: str, name: str, expected: str) -> Callable[..., Any]:
    """Return the user's function or class that an option names.

    Raises:
        ConfigError: There is none, or it cannot be called.
    """
    loaded = load_user_object(reference, f"{KEY}.{name}", expected)
    check_range(callable(loaded), f"{KEY}.{name}", reference, expected)
    function: Callable[..., Any] = loaded
    return function


def check_step_timeout(value: float) -> float:
    """Return `step_timeout_s`.

    Raises:
        ConfigError: It is not a time limit.
    """
    is_time = isinstance(value, int | float) and 0 < value <= MAX_TIMEOUT_S
    expected = f"a number of seconds up to {MAX_TIMEOUT_S}"
    check_range(is_time, f"{KEY}.step_timeout_s", value, expected)
    return float(value)


def mapping_option(value: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Return an option that is a mapping, as plain containers.

    Raises:
        ConfigError: It is not a mapping.
    """
    is_mapping = value is None or hasattr(value, "items")
    check_range(is_mapping, f"{KEY}.{name}", value, "a mapping")
    return dict(value or {})

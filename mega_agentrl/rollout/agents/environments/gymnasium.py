"""Gymnasium environments whose observations are texts, as agents.

::

    rollout:
      agent:
        _target_: mega_agentrl.rollout.agents.environments.gymnasium.GymnasiumAgent
        id: FrozenLake-v1
        make: {render_mode: ansi, is_slippery: false}

The environment runs in a thread of this process: one that may crash or block for ever belongs on a
server (`environments.openenv`). `extra_info.environment_kwargs` of a row may have `seed` and
`options`, which `reset` gets.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.rollout.agents.daemon_thread import DaemonThread
from mega_agentrl.rollout.agents.environments.episode import (
    DEFAULT_STEP_TIMEOUT_S,
    KEY,
    Observation,
    check_step_timeout,
    import_package,
    load_option,
    mapping_option,
    play,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.rollout.agents.base import AgentTask

_INTEGER = re.compile(r"-?\d+")


class GymnasiumAgent:
    """Plays a Gymnasium environment.

    Args:
        id: Registered name of the environment, or `package.module:NAME`.
        make: Further arguments of `gymnasium.make`.
        parse: `FILE.py:NAME` of a function from the policy's message to an action; a `ValueError`
            is shown to the policy. By default the last integer of the message if the actions are
            `Discrete`, else the message itself.
        describe: `FILE.py:NAME` of a function from observation and info to the text that the policy
            reads. By default the rendered environment if `render_mode` is `ansi`, else the
            observation.
        step_timeout_s: Time limit of each call.

    Raises:
        ConfigError: Gymnasium or the environment is not installed, or an argument is wrong.
    """

    def __init__(
        self,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        parse: str = "",
        describe: str = "",
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        gymnasium = import_package("gymnasium", "gymnasium")
        self.name = f"Gymnasium {id}"
        self._make = partial(gymnasium.make, id, **mapping_option(make, "make"))
        self._timeout_s = check_step_timeout(step_timeout_s)
        self._describe = describe and load_option(describe, "describe", "a function to a text")
        try:
            environment = self._make()
            self._parse = self._choose_parser(environment.action_space, gymnasium.spaces.Discrete)
            environment.close()
        except Exception as error:
            expected = "the name of an environment that `gymnasium.make` can create"
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{KEY}.id", id, expected, cause) from error
        if parse:
            self._parse = load_option(parse, "parse", "a function from a message to an action")

    async def run(self, task: AgentTask) -> float:
        """Play one episode and return the sum of its rewards."""
        environment = _Episode(self._make, task, self._parse, self._describe or _as_text)
        return await play(task, environment, self._timeout_s)

    def _choose_parser(self, space: Any, discrete: type) -> Callable[[str], Any]:
        return partial(_last_integer, space=space) if isinstance(space, discrete) else str


def _last_integer(message: str, space: Any) -> int:
    numbers = _INTEGER.findall(message)
    if not numbers or len(numbers[-1]) > 18 or not space.contains(int(numbers[-1])):
        first, last = int(space.start), int(space.start + space.n - 1)
        raise ValueError(f"end your message with an integer from {first} to {last}.")
    return int(numbers[-1])


def _as_text(observation: Any, info: Mapping[str, Any]) -> str:
    return str(observation)


class _Episode:
    """One environment in its own thread."""

    def __init__(
        self,
        make: Callable[[], Any],
        task: AgentTask,
        parse: Callable[[str], Any],
        describe: Callable[[Any, Mapping[str, Any]], str],
    ) -> None:
        self.parse = parse
        self._make = make
        self._describe = describe
        self._seed = task.seed
        self._options = task.environment_kwargs.get("options")
        self._thread = DaemonThread("gymnasium")
        self._environment: Any = None

    async def reset(self) -> Observation:
        return await self._thread.call(self._reset)

    async def step(self, action: Any) -> Observation:
        return await self._thread.call(partial(self._step, action))

    async def close(self) -> None:
        closing = self._thread.call(self._close)
        self._thread.stop()
        await closing

    def _reset(self) -> Observation:
        self._environment = self._make()
        observation, info = self._environment.reset(seed=self._seed, options=self._options)
        return Observation(text=self._text(observation, info))

    def _step(self, action: Any) -> Observation:
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return Observation(
            text=self._text(observation, info),
            reward=float(reward),
            is_last=bool(terminated or truncated),
        )

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _text(self, observation: Any, info: Mapping[str, Any]) -> str:
        if self._describe is _as_text and self._environment.render_mode == "ansi":
            return str(self._environment.render())
        return self._describe(observation, info)

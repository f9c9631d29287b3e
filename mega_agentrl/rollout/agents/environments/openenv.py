"""OpenEnv environments as agents: each attempt is a session of an environment server.

::

    rollout:
      agent:
        _target_: mega_agentrl.rollout.agents.environments.openenv.OpenEnvAgent
        base_url: http://localhost:8000

`extra_info.environment_kwargs` of a row are the arguments of `reset`; without a `seed` it gets one
that depends on the row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import check_range
from mega_agentrl.rollout.agents.environments.episode import (
    DEFAULT_STEP_TIMEOUT_S,
    KEY,
    Observation,
    check_step_timeout,
    episode_seed,
    import_package,
    load_option,
    play,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.rollout.agents.base import AgentTask

_RESULT_FIELDS = ("done", "reward", "metadata")


class OpenEnvAgent:
    """Plays an environment of an OpenEnv server.

    Args:
        base_url: Address of the server.
        client: `package.module:NAME` of the environment's own client; by default OpenEnv's
            `GenericEnvClient`, whose actions and observations are dicts.
        parse: `FILE.py:NAME` of a function from the policy's message to an action; a `ValueError`
            is shown to the policy. By default the whole message is the field `action_field`.
        action_field: Name of the only field of an action.
        describe: `FILE.py:NAME` of a function from an observation to the text that the policy
            reads. By default the observation's only text, or its fields as JSON.
        step_timeout_s: Time limit of each call.

    Raises:
        ConfigError: OpenEnv or the client is not installed, or an argument is wrong.
    """

    def __init__(
        self,
        *,
        base_url: str,
        client: str = "",
        parse: str = "",
        action_field: str = "message",
        describe: str = "",
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        self.name = f"OpenEnv {base_url}"
        is_url = isinstance(base_url, str) and base_url.startswith(("http", "ws"))
        check_range(is_url, f"{KEY}.base_url", base_url, "the URL of a server")
        generic = import_package("openenv.core", "openenv-core").GenericEnvClient
        self._client = load_option(client, "client", "an OpenEnv client") if client else generic
        self._base_url = base_url
        self._action_field = action_field
        self._timeout_s = check_step_timeout(step_timeout_s)
        self._parse: Callable[[str], Any] = self._as_field
        if parse:
            self._parse = load_option(parse, "parse", "a function from a message to an action")
        self._describe: Callable[[Any], str] = describe_observation
        if describe:
            self._describe = load_option(describe, "describe", "a function to a text")

    async def run(self, task: AgentTask) -> float:
        """Play one episode and return the sum of its rewards."""
        client = self._client(base_url=self._base_url, message_timeout_s=self._timeout_s)
        kwargs = {"seed": episode_seed(task), **task.environment_kwargs}
        episode = _Episode(client, kwargs, self._parse, self._describe)
        return await play(task, episode, self._timeout_s)

    def _as_field(self, message: str) -> dict[str, str]:
        return {self._action_field: message}


def describe_observation(observation: Any) -> str:
    """Return an observation's only field if it is a text, else all fields as JSON."""
    fields = observation if isinstance(observation, dict) else observation.model_dump()
    fields = {name: value for name, value in fields.items() if name not in _RESULT_FIELDS}
    texts = list(fields.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(fields, ensure_ascii=False, default=str)


class _Episode:
    """One session of the server."""

    def __init__(
        self,
        client: Any,
        reset_kwargs: dict[str, Any],
        parse: Callable[[str], Any],
        describe: Callable[[Any], str],
    ) -> None:
        self.parse = parse
        self._client = client
        self._reset_kwargs = reset_kwargs
        self._describe = describe
        self._episode_id: Any = None

    async def reset(self) -> Observation:
        await self._client.connect()
        observation = self._observation(await self._client.reset(**self._reset_kwargs))
        self._episode_id = await self._read_episode_id()
        return observation

    async def step(self, action: Any) -> Observation:
        observation = self._observation(await self._client.step(action))
        # Clients since 0.4 connect again without a word, to a session that was not reset.
        if await self._read_episode_id() != self._episode_id:
            raise ConnectionError("the server has lost the episode and answers from another one")
        return observation

    async def close(self) -> None:
        await self._client.close()

    async def _read_episode_id(self) -> Any:
        state = await self._client.state()
        fields = state if isinstance(state, dict) else vars(state)
        return fields.get("episode_id")

    def _observation(self, result: Any) -> Observation:
        return Observation(
            text=self._describe(result.observation),
            reward=float(result.reward or 0.0),
            is_last=bool(result.done),
        )

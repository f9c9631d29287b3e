"""OpenEnv environments as agents: each attempt is a session of an environment server.

::

    rollout:
      agent:
        _target_: mega_agentrl.rollout.agents.environments.openenv.OpenEnvAgent
        base_url: http://localhost:8000

`extra_info.environment_kwargs` of a row are the arguments of `reset`; without a `seed` it gets one
that depends on the row.

The server's WebSocket protocol (`openenv-core` 0.2 and 0.3) is spoken here, so that nothing of
OpenEnv has to be installed beside the trainer. A session is one connection to `/ws`, and each
message is an object that gets one answer::

    -> {"type": "reset", "data": {arguments}}    <- {"type": "observation", "data": {...}}
    -> {"type": "step", "data": {action}}        <- {"type": "observation", "data": {...}}
    -> {"type": "state"}                         <- {"type": "state", "data": {...}}
    -> {"type": "close"}                            no answer

The data of an observation are `observation`, an object, `reward` and `done`. Whatever fails is
answered with `{"type": "error", "data": {"code": ..., "message": ...}}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from mega_agentrl.config.errors import check_range
from mega_agentrl.rollout.agents.environments.episode import (
    DEFAULT_STEP_TIMEOUT_S,
    KEY,
    Observation,
    check_step_timeout,
    load_option,
    play,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mega_agentrl.rollout.agents.base import AgentTask

_RESULT_FIELDS = ("done", "reward", "metadata")
_WEBSOCKET_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_MAX_MESSAGE_BYTES = 1 << 26
_MAX_ERROR_CHARS = 500
_WRONG_FIELDS = ("missing", "extra_forbidden")
"""Types of pydantic's errors about the fields of an object, not about a value."""


class OpenEnvAgent:
    """Plays an environment of an OpenEnv server.

    Args:
        base_url: Address of the server.
        parse: `FILE.py:NAME` of a function from the policy's message to the fields of an action; a
            `ValueError` is shown to the policy. By default the whole message is `action_field`.
        action_field: Name of the only field of an action.
        describe: `FILE.py:NAME` of a function from an observation, a dict, to the text that the
            policy reads. By default the observation's only text, or its fields as JSON.
        step_timeout_s: Time limit of each call.

    Raises:
        ConfigError: An argument is wrong.
    """

    def __init__(
        self,
        *,
        base_url: str,
        parse: str = "",
        action_field: str = "message",
        describe: str = "",
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
    ) -> None:
        self.name = f"OpenEnv {base_url}"
        self._url = session_url(base_url)
        self._action_field = "" if parse else action_field
        self._timeout_s = check_step_timeout(step_timeout_s)
        self._parse: Callable[[str], Any] = self._as_field
        if parse:
            self._parse = load_option(parse, "parse", "a function from a message to an action")
        self._describe: Callable[[Any], str] = describe_observation
        if describe:
            self._describe = load_option(describe, "describe", "a function to a text")

    async def run(self, task: AgentTask) -> float:
        """Play one episode and return the sum of its rewards."""
        session = _Session(self._url)
        kwargs = {"seed": task.seed, **task.environment_kwargs}
        episode = _Episode(session, kwargs, self._parse, self._describe, self._action_field)
        return await play(task, episode, self._timeout_s)

    def _as_field(self, message: str) -> dict[str, str]:
        return {self._action_field: message}


def describe_observation(observation: Mapping[str, Any]) -> str:
    """Return an observation's only field if it is a text, else all fields as JSON."""
    fields = {name: value for name, value in observation.items() if name not in _RESULT_FIELDS}
    texts = list(fields.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return json.dumps(fields, ensure_ascii=False)


def session_url(base_url: object) -> str:
    """Return the WebSocket address of a server's sessions."""
    parts = urlsplit(base_url) if isinstance(base_url, str) else urlsplit("")
    is_url = parts.scheme in _WEBSOCKET_SCHEMES and bool(parts.hostname)
    check_range(is_url, f"{KEY}.base_url", base_url, "the URL of a server, http://HOST:PORT")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return parts._replace(scheme=_WEBSOCKET_SCHEMES[parts.scheme], path=path).geturl()


class ServerError(RuntimeError):
    """The server has answered a message with an error.

    Attributes:
        code: The server's code, such as `EXECUTION_ERROR`.
        errors: For `VALIDATION_ERROR` what pydantic found, as `ValidationError.errors()`.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code"))
        errors = data.get("errors")
        self.errors = [one for one in errors if isinstance(one, dict)] if errors else []
        text = f"{self.code}: {data.get('message')}"
        if self.errors:
            text += f": {_describe_errors(self.errors)}"
        if self.code == "CAPACITY_REACHED":
            text += (
                "; raise the server's max_concurrent_envs, or lower rollout.agent.max_concurrent"
            )
        super().__init__(text[:_MAX_ERROR_CHARS])


def _describe_errors(errors: list[dict[str, Any]]) -> str:
    parts = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors]
    return "; ".join(parts)[:_MAX_ERROR_CHARS]


class _Session:
    """One connection to the server.

    A task reads from the connection all the time, because the server pings a client and drops it if
    there is no answer, and aiohttp answers while something is being received.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stack = contextlib.AsyncExitStack()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._received: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()

    async def connect(self) -> None:
        http = await self._stack.enter_async_context(aiohttp.ClientSession())
        connecting = http.ws_connect(self._url, max_msg_size=_MAX_MESSAGE_BYTES)
        self._socket = await self._stack.enter_async_context(connecting)
        self._stack.callback(asyncio.create_task(self._read(self._socket)).cancel)

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            ServerError: The answer is an error.
            ConnectionError: The connection is lost.
            ValueError, TypeError: The answer has another form.
        """
        assert self._socket is not None, "connected by reset"
        message: dict[str, Any] = {"type": kind} if data is None else {"type": kind, "data": data}
        text = json.dumps(message)
        with contextlib.suppress(ConnectionError):  # the server has said why it closes
            await self._socket.send_str(text)
        received = await self._received.get()
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the connection is lost: {received.type.name} {received.data}")
        answer = json.loads(received.data)
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise TypeError(f"the answer to {kind} is {received.data[:_MAX_ERROR_CHARS]}")
        if answer.get("type") == "error":
            raise ServerError(content)
        return content

    async def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):
                await self._socket.send_str(json.dumps({"type": "close"}))
        await self._stack.aclose()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        is_open = True
        while is_open:
            received = await socket.receive()
            self._received.put_nowait(received)
            is_open = received.type is aiohttp.WSMsgType.TEXT


class _Episode:
    """An episode in a session of its own.

    Args:
        session: The session, not yet connected.
        reset_kwargs: Arguments of `reset`.
        parse: From a message to an action.
        describe: From an observation to a text.
        action_field: Name of the only field of an action; empty if `parse` is the user's.
    """

    def __init__(
        self,
        session: _Session,
        reset_kwargs: dict[str, Any],
        parse: Callable[[str], Any],
        describe: Callable[[Any], str],
        action_field: str,
    ) -> None:
        self.parse = parse
        self._session = session
        self._reset_kwargs = reset_kwargs
        self._describe = describe
        self._action_field = action_field
        self._episode_id: Any = None

    async def reset(self) -> Observation:
        await self._session.connect()
        observation = self._observation(await self._session.ask("reset", self._reset_kwargs))
        self._episode_id = await self._read_episode_id()
        return observation

    async def step(self, action: Any) -> Observation:
        if not isinstance(action, dict):
            raise TypeError(f"parse has returned a {type(action).__name__}, expected a dict")
        try:
            observation = self._observation(await self._session.ask("step", action))
        except ServerError as error:
            return self._refusal(error, action)
        # A server whose sessions share an environment has reset it for another one.
        if await self._read_episode_id() != self._episode_id:
            raise ConnectionError("the server has lost the episode and answers from another one")
        return observation

    async def close(self) -> None:
        await self._session.close()

    def _refusal(self, error: ServerError, action: dict[str, Any]) -> Observation:
        """Return what the policy reads if the server refuses its action; else raise the error."""
        values = list(_nodes(action))
        if error.code != "VALIDATION_ERROR" or not error.errors:
            raise error
        if any(one.get("input") not in values for one in error.errors):
            raise error  # not about the action
        if self._action_field and any(one.get("type") in _WRONG_FIELDS for one in error.errors):
            raise ValueError(f"{KEY}.action_field={self._action_field}: {error}")
        return Observation(text=f"Invalid action: {_describe_errors(error.errors)}")

    async def _read_episode_id(self) -> Any:
        return (await self._session.ask("state")).get("episode_id")

    def _observation(self, data: Mapping[str, Any]) -> Observation:
        fields = data.get("observation")
        if not isinstance(fields, dict):
            raise TypeError(f"the server's observation is {str(fields)[:_MAX_ERROR_CHARS]}")
        return Observation(
            text=self._describe(fields),
            reward=float(data.get("reward") or 0.0),
            is_last=bool(data.get("done")),
        )


def _nodes(value: Any) -> Iterator[Any]:
    """Yield a value and all values within it."""
    yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from _nodes(item)
        else:
            yield item

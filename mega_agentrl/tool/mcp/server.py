"""The servers of a run and their tools.

A server that keeps a state has one process for each trajectory (`per_trajectory`), which is started
by the first call and ended by `release`. The tools of a server share it, and their calls take
turns. Other servers are started once, and their calls run concurrently. A shared server that dies
or hangs is started again for the next call. If it does not start, or dies before it has answered
any call of the run, that is tried at most `MAX_RESTARTS` times in a row.

A policy can make a server end, hang or flood its output, also one that others share. Once the
server has answered a call in the run, such a loss is therefore the error of every policy whose call
was under way: it reads what happened, and so do its further calls if the server is not back. Nobody
is masked for what a call does. Other trajectories find a shared server started again; only if that
fails has the tool failed for them.

By an error of the protocol a server says that its own service is down. Many servers answer so to
arguments that they trip over, too. It is the policy's error as well if the server has answered any
call of the run shortly before (`ANSWER_PROOF_S`), and else that of the tool.

The state of a process cannot be copied. A fork therefore starts a new server and makes the same
calls again, except those of tools that the server calls read-only (`readOnlyHint`), and compares
the answers; without such calls it starts nothing. If an answer differs, the fork fails and is
counted; the trajectory itself goes on. Calls are made again only where they have no effect outside
of the sandbox: not with a network, without isolation, or on a server with a URL.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.blocking_calls import call_in_thread
from mega_agentrl.tool.deadline import DeadlineExceededError, run_with_deadline
from mega_agentrl.tool.function import choose_text_argument
from mega_agentrl.tool.mcp.answer import count_chars, to_response
from mega_agentrl.tool.mcp.connection import McpAnswerError, McpConnection, McpServerError
from mega_agentrl.tool.snippet import truncate_to_tokens
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mcp_types

    from mega_agentrl.tool.mcp.server_file import McpServerConfig
    from mega_agentrl.types.protocols import TextCodec

MAX_RESTARTS = 3
ANSWER_PROOF_S = 60.0
"""How long an answer proves that the service behind a server works. Trajectories that call a
server at all usually call it more often together; a service that is down longer fails them."""
_PING_TIMEOUT_S = 3.0
_MIN_CONCURRENT_STARTS = 4
_MAX_CHARS_ON_LOOP = 256 << 10
"""Longer answers are decoded in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTool:
    """A tool as its server describes it."""

    name: str
    """Name in the run."""
    remote_name: str
    """Name on the server."""
    description: str
    """Description for the policy."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    is_read_only: bool
    """Whether the server says that calls change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedServer:
    """A server and those of its tools that the run gets."""

    config: McpServerConfig
    tools: tuple[ListedTool, ...]


@dataclass(frozen=True, slots=True)
class _AnsweredCall:
    """A call that a fork repeats."""

    tool: str
    arguments: dict[str, Any]
    answer_digest: str


@dataclass(slots=True)
class McpSession:
    """A trajectory's own connection, if it has one, and what happened to its calls."""

    connection: McpConnection | None = None
    """None until the first call, and with a shared server."""
    calls: list[_AnsweredCall] = field(default_factory=list)
    """Answered calls that may have changed the state."""
    unknown_outcome: str = ""
    """Tool of a call that was not answered in time; empty if all were answered."""
    has_lost_server: bool = False
    """Whether a call was under way when the server was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """What an answer may contain."""

    codec: TextCodec
    """Counts tokens."""
    max_tokens: int
    """Maximum length of the text."""
    shows_images: bool
    """Whether the model sees images."""


class McpServer:
    """A server of the run, which its tools share.

    Args:
        config: The server.
        shows_images: Whether the model sees images.
    """

    def __init__(self, config: McpServerConfig, *, shows_images: bool) -> None:
        self.config = config
        self._shows_images = shows_images
        self._last_answer_s = -inf
        self._shared: McpConnection | None = None
        self._num_starts = 0
        self._lock = asyncio.Lock()
        self._start_slots = asyncio.Semaphore(max(_MIN_CONCURRENT_STARTS, os.cpu_count() or 1))
        self._open_connections: set[McpConnection] = set()

    async def start(self) -> None:
        """Start a shared server; raises `ConfigError` if it does not start."""
        if not self.config.per_trajectory:
            try:
                await self._shared_connection()
            except McpServerError as error:
                raise not_started(self.config, error) from error

    async def connection_of(self, session: McpSession) -> McpConnection:
        """Return the connection for the next call, of a server that is started if necessary.

        Raises:
            McpServerError: The server does not start, or has been started too often.
        """
        if not self.config.per_trajectory:
            return await self._shared_connection()
        if session.connection is None:
            session.connection = await self._connect()
        return session.connection

    async def _shared_connection(self) -> McpConnection:
        async with self._lock:
            connection = self._shared
            if connection is not None and not connection.is_lost:
                return connection
            if self._num_starts > MAX_RESTARTS:
                raise McpServerError(
                    f"MCP server {self.config.name}: started {self._num_starts} times in a row "
                    "without success; it is not started again"
                )
            self._num_starts += 1
            if connection is not None:
                await self.close_connection(connection)
            self._shared = await self._connect()
            if self._has_answered:  # what ends it from now on are calls
                self._num_starts = 0
            return self._shared

    def note_answer(self) -> None:
        """Record that the server answered a call, so that it may be restarted again."""
        self._num_starts = 0
        self._last_answer_s = time.monotonic()

    @property
    def _has_answered(self) -> bool:
        return self._last_answer_s > -inf

    def is_policy_error(self, error: McpServerError, session: McpSession) -> bool:
        """Return whether the policy's calls may have caused an error, rather than the run.

        Args:
            error: What the call ended with.
            session: The state of the trajectory.
        """
        if isinstance(error, McpAnswerError):
            return time.monotonic() - self._last_answer_s < ANSWER_PROOF_S
        return self._has_answered and session.has_lost_server

    async def fork(self, session: McpSession) -> McpSession:
        """Return a session with the same state, on a new server if it has its own and was called.

        Raises:
            McpServerError: The calls may not be repeated, or were answered otherwise.
        """
        if not self.config.per_trajectory:
            return McpSession(has_lost_server=session.has_lost_server)
        lead = f"MCP server {self.config.name} cannot be forked"
        if session.unknown_outcome:
            raise McpServerError(f"{lead}: a call of {session.unknown_outcome} was not answered")
        calls = list(session.calls)
        if not calls:
            return McpSession()
        if not self.config.has_replayable_state:
            raise McpServerError(
                f"{lead}: calls are only repeated in a sandbox without network; set "
                "per_trajectory=false if the server keeps no state of a trajectory"
            )
        connection = await self._connect()
        try:
            for number, call in enumerate(calls, start=1):
                work = connection.call(call.tool, call.arguments)
                result = await run_with_deadline(work, self.config.timeout_s)
                if _digest(result) != call.answer_digest:
                    raise McpServerError(  # noqa: TRY301
                        f"{lead}: call {number} ({call.tool}) was answered otherwise than before; "
                        "set per_trajectory=false if the server keeps no state of a trajectory"
                    )
        except BaseException:
            await self.close_connection(connection)
            raise
        return McpSession(connection, calls)

    async def close_connection(self, connection: McpConnection) -> None:
        """End a connection, and the process behind it."""
        await connection.close()
        self._open_connections.discard(connection)

    async def close(self) -> None:
        """End all connections. Safe to call twice."""
        await asyncio.gather(*map(self.close_connection, tuple(self._open_connections)))

    def close_now(self) -> None:
        """End all processes from synchronous code."""
        while self._open_connections:
            self._open_connections.pop().close_now()

    async def _connect(self) -> McpConnection:
        async with self._start_slots:
            connection = McpConnection(self.config, shows_images=self._shows_images)
            self._open_connections.add(connection)
            try:
                await connection.open()
            except BaseException:
                self._open_connections.discard(connection)
                raise
        return connection


class McpTool(Tool):
    """A tool of a server.

    Args:
        server: The server.
        listed: How the server describes the tool.
        limits: Limits of its answers.
    """

    timeout_s = None  # `execute` enforces it, because it has to ask whether the server is alive

    def __init__(self, server: McpServer, listed: ListedTool, limits: AnswerLimits) -> None:
        self.name = listed.name
        self.description = listed.description
        self.parameters = listed.parameters
        self.text_argument = choose_text_argument(listed.parameters)
        self.state_group = server
        self.takes_turns = server.config.per_trajectory
        self.declared_in = server.config.key
        self._server = server
        self._listed = listed
        self._limits = limits

    async def start(self) -> None:
        """Start a shared server, once for all its tools."""
        await self._server.start()

    async def close(self) -> None:
        """End the server."""
        await self._server.close()

    def close_now(self) -> None:
        """End the server from synchronous code."""
        self._server.close_now()

    async def create(self, kwargs: Mapping[str, Any]) -> McpSession:
        """Return the state of a trajectory."""
        return McpSession()

    async def execute(
        self, state: McpSession, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Call the tool.

        Raises:
            ToolInputError: The server refuses the arguments.
            McpServerError: The server failed, died or hangs, and not through a call of the policy.
        """
        try:
            connection = await self._server.connection_of(state)
        except McpServerError as error:
            return self._answer_to(state, error)
        timeout_s, remote_name = self._server.config.timeout_s, self._listed.remote_name
        try:
            result = await run_with_deadline(
                connection.call(remote_name, dict(arguments)), timeout_s
            )
        except DeadlineExceededError:
            state.unknown_outcome = self.name
            if await connection.answers(_PING_TIMEOUT_S):
                text = f"Timed out after {timeout_s:g} s."
                return ToolResponse(text=text, status=ToolStatus.timeout)
            await self._server.close_connection(connection)
            hang = McpServerError(
                f"MCP server {self._server.config.name} hangs: no answer to {remote_name} within "
                f"{timeout_s:g} s, and none to a ping"
            )
            state.has_lost_server = True
            return self._answer_to(state, hang, ToolStatus.timeout)
        except McpServerError as error:
            state.unknown_outcome = self.name
            state.has_lost_server |= not isinstance(error, McpAnswerError)
            return self._answer_to(state, error)
        self._server.note_answer()
        return await self._respond(state, dict(arguments), result)

    async def fork(self, state: McpSession) -> McpSession:
        """Return a state on which the same calls were made; raises `McpServerError`."""
        return await self._server.fork(state)

    async def release(self, state: McpSession, kwargs: Mapping[str, Any]) -> None:
        """End the trajectory's own server."""
        if state.connection is not None:
            await self._server.close_connection(state.connection)

    def _answer_to(
        self, state: McpSession, error: McpServerError, status: ToolStatus = ToolStatus.user_error
    ) -> ToolResponse:
        """Return what the policy reads of an error that it may have caused; raise any other."""
        if not self._server.is_policy_error(error, state):
            raise error from None
        return ToolResponse(text=str(error), status=status)

    async def _respond(
        self, state: McpSession, arguments: dict[str, Any], result: mcp_types.CallToolResult
    ) -> ToolResponse:
        """Record an answered call, and return what the policy sees of the answer."""
        is_large = count_chars(result) > _MAX_CHARS_ON_LOOP
        if self._server.config.per_trajectory and not self._listed.is_read_only:
            digest = await call_in_thread(_digest, result) if is_large else _digest(result)
            state.calls.append(_AnsweredCall(self._listed.remote_name, arguments, digest))
        read = partial(
            to_response,
            result,
            shows_images=self._limits.shows_images,
            redact=self._server.config.redact,
        )
        response = await call_in_thread(read) if is_large else read()
        codec, max_tokens = self._limits.codec, self._limits.max_tokens
        return replace(response, text=truncate_to_tokens(response.text, codec, max_tokens))


def make_tools(listed: ListedServer, limits: AnswerLimits) -> list[Tool]:
    """Return the tools of a server; nothing is started."""
    server = McpServer(listed.config, shows_images=limits.shows_images)
    return [McpTool(server, tool, limits) for tool in listed.tools]


def not_started(config: McpServerConfig, error: Exception) -> ConfigError:
    """Return the error of a server that does not start or list its tools."""
    cause = str(error)
    if os.path.basename(config.origin) in ("npx", "uvx", "uv"):
        cause += (
            f"; {config.origin} downloads packages at each start: install the package and name its "
            'program, or set "network": "host"'
        )
    expected = "an MCP server that starts and lists its tools"
    return ConfigError(config.key, config.origin, expected, cause)


def _digest(result: mcp_types.CallToolResult) -> str:
    return hashlib.sha256(result.model_dump_json(exclude={"meta"}).encode()).hexdigest()

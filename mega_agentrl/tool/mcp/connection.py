"""One session with an MCP server, over the pipes of a sandboxed process or streamable HTTP.

A task of its own owns the SDK's session, because anyio's task groups must be left by the task that
entered them; calls may come from any task of the same event loop. The SDK's own transport for
commands is not used, because it would start the server outside of the sandbox.

What a server may send is bounded (`bounds`, `pipes`, `http_client`). An answer that is too long
fails its call; more messages than allowed, or the end of the output, end the session and every
waiting call with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import httpx2
import mcp_types
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from mega_agentrl.sandbox.command import SandboxedCommand, SandboxedProcess, start
from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.mcp.bounds import (
    ANSWER_REFUSED,
    MAX_ERROR_CHARS,
    MAX_IMAGE_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MessageFilter,
    ServerFloodError,
)
from mega_agentrl.tool.mcp.http_client import BoundedClient
from mega_agentrl.tool.mcp.pipes import ServerOutputError, read_messages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from mcp.client._transport import ReadStream, TransportStreams

    from mega_agentrl.tool.mcp.server_file import McpServerConfig

ResultT = TypeVar("ResultT")

START_TIMEOUT_S = 50.0
"""Limit of start and handshake; below the limit of a tool's `create`."""

_MAX_PAGES = 100
_STOP_GRACE_S = 2.0
"""Time that a server gets to end by itself when its input is closed, as the protocol asks for."""
_LAST_WORDS_TIMEOUT_S = 5.0
"""Time that a server whose output has ended gets to end and say why, which only errors wait for."""
_HTTP_TIMEOUT_S = 30.0
_CLOSED = "closed"
_ENDED = "the server has ended"
_CLIENT_INFO = mcp_types.Implementation(name="mega_agentrl", version="0.1.0")

_log = logging.getLogger(__name__)


class McpServerError(RuntimeError):
    """A server does not start, has died, or breaks the protocol."""


class McpAnswerError(McpServerError):
    """A server answers a request with an error, and goes on."""


class McpConnection:
    """A session with a server; call `open` first and `close` at the end.

    Args:
        config: The server.
        shows_images: Whether answers may have images, which makes them longer.
    """

    def __init__(self, config: McpServerConfig, *, shows_images: bool = False) -> None:
        self._config = config
        self._max_bytes = MAX_IMAGE_MESSAGE_BYTES if shows_images else MAX_MESSAGE_BYTES
        self._filter = MessageFilter()
        self._session: ClientSession | None = None
        self._process: SandboxedProcess | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._loss = ""
        self._has_other_lines = False

    @property
    def is_lost(self) -> bool:
        """Whether no further call can succeed."""
        return bool(self._loss)

    async def open(self) -> None:
        """Start or reach the server and shake hands; raises `McpServerError`."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own_session(ready))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await ready
        except TimeoutError as error:
            self._loss = f"no handshake within {START_TIMEOUT_S:g} s"
            await self.close()
            raise self._error(self._loss) from error
        except BaseException:
            await self.close()
            raise

    async def list_tools(self) -> list[Any]:
        """Return the tools of all pages as the server describes them; raises `McpServerError`.

        They are not checked: the SDK would refuse a whole page for one schema that it dislikes.
        """
        self._filter.start_listing()
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            page = await self._request(self._active_session().list_tools(params=params))
            cursor = page.next_cursor
            if not cursor:
                return self._filter.take_listing()
        raise self._error(f"tools/list has more than {_MAX_PAGES} pages")

    async def call(self, name: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Return the answer of a tool.

        Raises:
            ToolInputError: The server refuses the arguments, or its answer is too long.
            McpAnswerError: The server answers with another error.
            McpServerError: The server is gone.
        """
        params = mcp_types.CallToolRequestParams(name=name, arguments=arguments)
        request = mcp_types.CallToolRequest(params=params)
        work = self._active_session().send_request(request, mcp_types.CallToolResult)
        return await self._request(work)

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the server answers a ping in time; one that does not is lost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._active_session().send_ping()
        except (TimeoutError, MCPError, McpServerError):
            self._loss = self._loss or f"no answer to a ping within {timeout_s:g} s"
            return False
        return True

    async def close(self) -> None:
        """End the session and a server that it started. Safe to call twice."""
        self._loss = self._loss or _CLOSED
        self._stop.set()
        if self._owner is None:
            return
        if self._session is None:  # it is still shaking hands
            self._owner.cancel()
        _, running = await asyncio.wait({self._owner}, timeout=2 * _STOP_GRACE_S)
        if running:
            self._owner.cancel()
            await asyncio.wait(running, timeout=_STOP_GRACE_S)
        if self._process is not None:
            await self._process.kill()

    def close_now(self) -> None:
        """End a server that the session started, from synchronous code."""
        self._loss = self._loss or _CLOSED
        if self._process is not None:
            self._process.kill_now()

    def _active_session(self) -> ClientSession:
        if self._session is None or self._loss:
            raise self._error(self._loss or "not connected")
        return self._session

    async def _request(self, work: Awaitable[ResultT]) -> ResultT:
        try:
            result = await work
        except MCPError as error:
            if error.code == mcp_types.CONNECTION_CLOSED:
                self._lose("the server closed the connection")
                await self._wait_for_stderr()
                raise self._error(f"{error.message} (code {error.code})") from None
            self._filter.note_answer()
            if error.code in (mcp_types.INVALID_PARAMS, ANSWER_REFUSED):
                raise ToolInputError(self._config.redact(error.message)[:MAX_ERROR_CHARS]) from None
            raise self._error(f"{error.message} (code {error.code})", McpAnswerError) from None
        except ValueError:  # of pydantic: it contains the whole answer
            raise self._error("it sent an answer that is not of the protocol") from None
        self._filter.note_answer()
        return result

    def _lose(self, loss: str) -> None:
        self._loss = self._loss or loss

    def _error(self, text: str, kind: type[McpServerError] = McpServerError) -> McpServerError:
        text = self._config.redact(text)[:MAX_ERROR_CHARS]
        loss = f": {self._loss}" if self._loss and self._loss not in text else ""
        note = self._process.stderr_note() if self._process is not None else ""
        return kind(self._config.redact(f"MCP server {self._config.name}: {text}{loss}{note}"))

    async def _own_session(self, ready: asyncio.Future[None]) -> None:
        """Keep the session until `close`, or until the server ends it."""
        try:
            async with (
                self._transport() as (reader, writer),
                ClientSession(
                    _FilteredReader(reader, self._filter, self._lose),
                    writer,
                    client_info=_CLIENT_INFO,
                ) as session,
            ):
                await session.initialize()
                self._session = session
                if not ready.done():
                    ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001  the SDK and the server may raise anything
            text = _first_message(error)
            if ready.done():
                _log.debug("MCP server %s: %s", self._config.name, self._config.redact(text))
            else:
                await self._wait_for_stderr()
                ready.set_exception(self._error(text))
        finally:
            self._loss = self._loss or "the session has ended"
            if not ready.done():
                ready.cancel()

    async def _wait_for_stderr(self) -> None:
        """Read what a server that is ending says, which may come after the end of its output."""
        if self._process is not None and self._loss == _ENDED:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S):
                    await self._process.wait()

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[TransportStreams]:
        config = self._config
        if config.command:
            self._process = await start(_sandboxed(config), max_line_bytes=MAX_MESSAGE_BYTES)
            try:
                async with self._process_streams(self._process) as streams:
                    yield streams
            finally:
                # A server that is lost cannot end by itself.
                is_answering = self._loss == _CLOSED
                await _end_process(self._process, _STOP_GRACE_S if is_answering else 0.0)
            return
        timeout = httpx2.Timeout(_HTTP_TIMEOUT_S, read=config.timeout_s + _HTTP_TIMEOUT_S)
        async with (
            BoundedClient(
                headers=config.headers,
                timeout=timeout,
                answer_timeout_s=max(START_TIMEOUT_S, config.timeout_s),
                max_message_bytes=self._max_bytes,
                on_session_end=lambda: self._lose("the server has ended the session"),
            ) as client,
            streamable_http_client(
                config.url, http_client=client, max_sse_event_size=2 * self._max_bytes
            ) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _process_streams(self, process: SandboxedProcess) -> AsyncIterator[TransportStreams]:
        """Yield the SDK's streams over the pipes of a process."""
        to_session, reader = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        writer, from_session = anyio.create_memory_object_stream[SessionMessage](0)

        async def read_messages() -> None:
            async with to_session:
                with contextlib.suppress(anyio.BrokenResourceError):
                    async for message in self._read_messages(process.stdout):
                        await to_session.send(message)

        async def write_messages() -> None:
            with contextlib.suppress(OSError):  # the reader notices that the process has ended
                async for message in from_session:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(text.encode() + b"\n")
                    await process.stdin.drain()

        async with reader, writer, from_session, anyio.create_task_group() as tasks:
            tasks.start_soon(read_messages)
            tasks.start_soon(write_messages)
            try:
                yield reader, writer
            finally:
                tasks.cancel_scope.cancel()

    async def _read_messages(self, stdout: asyncio.StreamReader) -> AsyncIterator[SessionMessage]:
        try:
            async for message in read_messages(stdout, self._max_bytes, self._note_other_line):
                yield SessionMessage(message)
        except (ServerOutputError, ServerFloodError) as error:
            self._lose(str(error))

    def _note_other_line(self) -> None:
        if not self._has_other_lines:
            self._has_other_lines = True
            _log.warning(
                "MCP server %s writes lines that are no messages to its standard output",
                self._config.name,
            )
        self._filter.note_other()


class _FilteredReader:
    """A stream of those messages of a server that a session may see.

    Args:
        stream: All messages.
        message_filter: Decides about them.
        on_flood: Called with the reason when there are too many; the stream then ends.
    """

    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        message_filter: MessageFilter,
        on_flood: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._filter = message_filter
        self._on_flood = on_flood

    @property
    def last_context(self) -> Any:
        """The context of the sender, which the SDK asks for."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message; raises `anyio.EndOfStream` at the end."""
        while True:
            item = await self._stream.receive()
            if not isinstance(item, SessionMessage):
                return item
            try:
                message = self._filter.filter(item.message)
            except ServerFloodError as error:
                self._on_flood(str(error))
                raise anyio.EndOfStream from error
            if message is not None:
                return SessionMessage(message, item.metadata)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._stream.__aexit__(exc_type, exc_val, exc_tb)


def _sandboxed(config: McpServerConfig) -> SandboxedCommand:
    return SandboxedCommand(
        command=config.command,
        environment=config.environment,
        read_only=config.read_only,
        working_folder=config.working_folder,
        network=config.network,
        isolation=config.isolation,
    )


async def _end_process(process: SandboxedProcess, grace_s: float) -> None:
    """Close the input of a server, let it end by itself, and kill it if it does not."""
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await process.wait()
    await process.kill()


def _first_message(error: BaseException) -> str:
    """Return type and text of an error, of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) or "no message"
    return text if isinstance(error, RuntimeError | MCPError) else f"{type(error).__name__}: {text}"

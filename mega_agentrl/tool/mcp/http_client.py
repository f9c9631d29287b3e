"""An HTTP client for the SDK's transport that bounds what a server with a URL may send.

Bodies are not packed, and their bytes are counted before they are parsed. An answer that is not
read, for its size or because it comes too late, is replaced by an error of JSON-RPC, so that one
call fails and the session goes on. Of event streams only data, names and numbers of events go
through; a server cannot choose when a connection is opened again. The stream of messages outside of
calls is not opened. Redirects stay within the server's origin, which the SDK sees to.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import httpx2

from mega_agentrl.tool.mcp.bounds import MAX_MESSAGE_BYTES, refusal, size_problem, too_long

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

TRANSPORT_FAILED = -32098
"""Error code, of those that JSON-RPC leaves to implementations, of a request without an answer."""

_MAX_CONNECTIONS = 256
"""Calls at a time; further ones wait."""
_MAX_COOKIES = 64
_MAX_EVENT_IDS = 1_000
_MAX_EVENT_ID_BYTES = 256
_EVENT_END = re.compile(rb"\n\r?\n|\r\r|\r\n\r")
_ANSWER_MARGIN_S = 5.0
"""Time from the end of a call, which may be told to the server, to the end of its connection."""


class BoundedClient(httpx2.AsyncClient):
    """A client of one server.

    Args:
        headers: Headers of each request.
        timeout: Limit of each wait.
        answer_timeout_s: Limit of a request, its answer included.
        max_message_bytes: Longest message that is read.
        on_session_end: Called when the server does not know the session any more.
    """

    def __init__(
        self,
        *,
        headers: Mapping[str, str],
        timeout: httpx2.Timeout,
        answer_timeout_s: float,
        max_message_bytes: int,
        on_session_end: Callable[[], None],
    ) -> None:
        limits = httpx2.Limits(max_connections=_MAX_CONNECTIONS)
        super().__init__(headers=dict(headers), timeout=timeout, limits=limits)
        self._answer_timeout_s = answer_timeout_s + _ANSWER_MARGIN_S
        self._max_bytes = max_message_bytes
        self._on_session_end = on_session_end
        self._deadlines: dict[str, float] = {}
        """Deadline of the request whose stream had the event of this number."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, as `httpx2.AsyncClient.send` does, and return its bounded response."""
        request.headers["Accept-Encoding"] = "identity"
        deadline = asyncio.get_running_loop().time() + self._answer_timeout_s
        if request.method == "GET":
            known = self._deadlines.pop(request.headers.get("last-event-id", ""), 0.0)
            if known <= deadline - self._answer_timeout_s:
                return httpx2.Response(405, request=request)
            deadline = known
        try:
            async with asyncio.timeout_at(deadline):
                response = await super().send(request, **options)
                if len(self.cookies.jar) > _MAX_COOKIES:
                    self.cookies.clear()
                return await self._bounded(request, response, deadline)
        except TimeoutError:
            return _refused(request, "The tool did not answer in time.")
        except httpx2.PoolTimeout:
            return _refused(request, "Too many calls of the tool run at once. Try again later.")
        except httpx2.TransportError as error:
            if request.method != "POST":
                raise
            return _refused(request, f"{type(error).__name__}: {error}", TRANSPORT_FAILED)

    async def _bounded(
        self, request: httpx2.Request, response: httpx2.Response, deadline: float
    ) -> httpx2.Response:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            self._on_session_end()
        if kind not in ("application/json", "text/event-stream") or response.has_redirect_location:
            response.stream = _EmptyStream(response.stream)
            return response
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            await response.aclose()
            text = f"The server packs its answers as {encoding[:32]}, which was not asked for."
            return _refused(request, text, TRANSPORT_FAILED)
        if kind == "text/event-stream":
            response.stream = _EventStream(
                response.stream, request, self._max_bytes, deadline, self._note_event
            )
            return response
        return await self._read_json(request, response)

    async def _read_json(
        self, request: httpx2.Request, response: httpx2.Response
    ) -> httpx2.Response:
        """Return a response whose body is read, and small enough to be parsed."""
        body = bytearray()
        try:
            async for part in response.aiter_raw():
                body += part
                if len(body) > self._max_bytes:
                    break
        finally:
            await response.aclose()
        if problem := size_problem(body, self._max_bytes):
            return _refused(request, problem)
        kept = {
            name: response.headers[name]
            for name in ("content-type", "mcp-session-id")
            if name in response.headers
        }
        return httpx2.Response(
            response.status_code, headers=kept, content=bytes(body), request=request
        )

    def _note_event(self, event_id: str, deadline: float) -> None:
        """Remember until when the stream of an event may be opened again."""
        self._deadlines[event_id] = deadline
        while len(self._deadlines) > _MAX_EVENT_IDS:
            del self._deadlines[next(iter(self._deadlines))]


class _EmptyStream(httpx2.AsyncByteStream):
    """A body that is not read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        parts: tuple[bytes, ...] = ()
        for part in parts:
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _EventStream(httpx2.AsyncByteStream):
    """A stream of events, each of which is small enough to be parsed.

    Args:
        stream: The body as it arrives.
        request: The request that it answers.
        max_bytes: Longest data of an event.
        deadline: When the stream ends.
        on_event: Called with the number of an event that has one, and the deadline.
    """

    def __init__(
        self,
        stream: Any,
        request: httpx2.Request,
        max_bytes: int,
        deadline: float,
        on_event: Callable[[str, float], None],
    ) -> None:
        self._stream = stream
        self._request = request
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._on_event = on_event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield whole events, at the end perhaps one that says why there are no more."""
        parts = aiter(self._stream)
        pending, num_bytes, problem = bytearray(), 0, ""
        while not problem:
            try:
                async with asyncio.timeout_at(self._deadline):
                    part = await anext(parts, None)
            except TimeoutError:
                problem = "The tool did not answer in time."
                break
            is_end = part is None
            part = part or (b"\n" if pending.endswith(b"\r") else b"")
            num_bytes += len(part)
            has_end = _EVENT_END.search(pending[-3:] + part) is not None
            pending += part
            *events, pending = _split_events(pending) if has_end else [pending]
            for event in events:
                data = self._filtered(event)
                if problem := size_problem(data, self._max_bytes):
                    break
                if data:
                    yield bytes(data)
            # Other messages have as much room as a message of text.
            if max(len(pending), num_bytes - MAX_MESSAGE_BYTES) > self._max_bytes:
                problem = problem or too_long(self._max_bytes)
            if is_end and not problem:
                return
        yield b"data: " + _error_body(self._request, problem) + b"\n\n"

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _filtered(self, event: bytearray) -> bytearray:
        """Return an event without comments, and without the time to the next connection."""
        filtered = bytearray()
        for line in event.splitlines():
            name, _, value = line.partition(b":")
            if name == b"id" and len(value) <= _MAX_EVENT_ID_BYTES:
                event_id = value.removeprefix(b" ").decode("utf-8", "replace")
                self._on_event(event_id, self._deadline)
                filtered += line + b"\n"
            elif bytes(name) in (b"data", b"event"):
                filtered += line + b"\n"
        return filtered + b"\n" if filtered else filtered


def _split_events(pending: bytearray) -> list[bytearray]:
    """Split at blank lines; the last part is the beginning of an event."""
    if pending.find(b"\r") >= 0:
        held_back = pending[-1:] if pending.endswith(b"\r") else b""
        whole = pending[: len(pending) - len(held_back)]
        pending = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held_back
    return pending.split(b"\n\n")


def _refused(request: httpx2.Request, text: str, code: int | None = None) -> httpx2.Response:
    """Return the response that stands for an answer which is not read."""
    body = _error_body(request, text, code)
    if not body:
        return httpx2.Response(202, request=request)
    headers = {"content-type": "application/json"}
    return httpx2.Response(200, headers=headers, content=body, request=request)


def _error_body(request: httpx2.Request, text: str, code: int | None = None) -> bytes:
    """Return the error in place of the answer to a request; empty for a message without one."""
    request_id: int | str | None = 0  # the SDK knows which request a stream belongs to
    if request.method == "POST":
        request_id = json.loads(request.content).get("id")
    if request_id is None:
        return b""
    answer = refusal(request_id, text)
    if code is not None:
        answer.error.code = code
    return answer.model_dump_json(by_alias=True, exclude_unset=True).encode()

"""The HTTP server of the gateway: OpenAI's and Anthropic's APIs, in the process of the rollouts.

A session is named by its key, which the client sends as its API key (`Authorization: Bearer KEY` or
`x-api-key: KEY`) or as part of the base URL (`/sessions/KEY/v1`). Keys are random, and requests
with another key are refused. The server listens on the loopback interface unless told otherwise,
and on a Unix socket for agents in sandboxes, which have no network.

What clients send is untrusted. Sizes are checked before anything is done with a request
(`_received`, `request_size`), work that grows with it is done in threads (`work_threads`), and
bytes in flight, bytes held (`limits`), connections (`connections`), sessions, requests of a session
and lines of the log (`http_log`) are bounded. `Gateway.usage` tells how close these bounds are.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.connections import IDLE_TIMEOUT_S, Connections
from mega_agentrl.rollout.gateway.dialects.anthropic import AnthropicMessages
from mega_agentrl.rollout.gateway.dialects.base import decode_body, encode_json
from mega_agentrl.rollout.gateway.dialects.openai_chat import OpenAIChat
from mega_agentrl.rollout.gateway.dialects.openai_responses import OpenAIResponses
from mega_agentrl.rollout.gateway.http_log import HttpLog
from mega_agentrl.rollout.gateway.ignored_fields import IgnoredFields
from mega_agentrl.rollout.gateway.limits import GatewayUsage, SharedResources, in_flight_budget
from mega_agentrl.rollout.gateway.request_size import (
    MAX_ARGUMENT_BYTES,
    check_decoding_work,
    decoding_work,
)
from mega_agentrl.rollout.gateway.session import AgentSession
from mega_agentrl.rollout.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from aiohttp.typedefs import Handler

    from mega_agentrl.rollout.gateway.chat import ChatAnswer, ChatRequest
    from mega_agentrl.rollout.gateway.dialects.base import Body, Dialect
    from mega_agentrl.rollout.gateway.session import SessionScope

KEEP_ALIVE_S = 10.0
"""Time between the events of a stream whose answer is being sampled."""

BODY_TIMEOUT_S = 30.0
"""Time that a client has to send a body: 64 MiB at 20 Mbit/s."""

WARNING_HEADER = "x-gateway-warning"

_OPENAI = OpenAIChat()
_ANTHROPIC = AnthropicMessages()
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": _OPENAI,
    "/v1/responses": OpenAIResponses(),
    "/v1/messages": _ANTHROPIC,
}
_SERVED = ", ".join(f"POST {path}" for path in _DIALECTS)
_HAS_BEGUN = web.RequestKey("has_begun", bool)
"""Key of a request that has been answered in part."""
_HTTP_LOG = web.AppKey("http_log", HttpLog)
_MIB = 2**20
_log = logging.getLogger(__name__)


class Gateway:
    """Serves the sessions of a run; `start` it on the event loop of the rollouts."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        self._settings = settings or GatewaySettings()
        self._sessions: dict[str, AgentSession] = {}
        self._ignored_fields = IgnoredFields()
        self._shared = SharedResources()
        self._in_flight = in_flight_budget(self._settings.max_body_mib * _MIB)
        self._log = HttpLog(_log)
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._folder: Path | None = None
        self.url = ""
        """Address of the server without a path, `http://HOST:PORT`, once it has started."""

    @property
    def socket_path(self) -> Path:
        """Unix socket at which the gateway listens as well."""
        assert self._folder is not None, "the gateway has not started"
        return self._folder / "gateway.sock"

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def usage(self) -> GatewayUsage:
        """Return what the gateway holds at the moment, with its bounds; safe in any thread."""
        connections, held = self._connections, self._shared.held
        return GatewayUsage(
            num_sessions=len(self._sessions),
            max_sessions=self._settings.max_sessions,
            num_connections=connections.num_open if connections else 0,
            max_connections=connections.max_connections if connections else 0,
            bytes_in_flight=self._in_flight.total,
            max_bytes_in_flight=self._in_flight.max_total,
            bytes_held=held.total,
            max_bytes_held=held.max_total,
            most_bytes_held=held.most,
            max_bytes_held_per_session=held.max_per_owner,
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be used.
        """
        self._runner = web.AppRunner(
            self._make_application(),
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_TIMEOUT_S,
            auto_decompress=False,
            logger=self._log,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server)
        host = self._settings.host
        port = self._connections.listen((host, self._settings.port))
        # The sandbox's user must reach the socket; the keys keep others out.
        self._folder = Path(tempfile.mkdtemp(prefix="gateway-"))
        self._folder.chmod(0o711)
        self._connections.listen(str(self.socket_path))
        self.socket_path.chmod(0o666)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _make_application(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json])
        app[_HTTP_LOG] = self._log
        for prefix in ("", "/sessions/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/tools", self._list_tools)
            app.router.add_post(f"{prefix}/v1/tools/{{tool}}", self._call_tool)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
            for path in _DIALECTS:
                app.router.add_post(prefix + path, self._complete)
        return app

    async def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._ignored_fields.report_rest()
        self._log.report_rest()
        if self._connections is not None:
            await self._connections.close()
            self._connections = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._shared.threads.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def open_session(self, scope: SessionScope) -> tuple[str, AgentSession]:
        """Return a new session and its key.

        Raises:
            RuntimeError: too many sessions are open.
        """
        if len(self._sessions) >= self._settings.max_sessions:
            raise RuntimeError(
                f"gateway: {len(self._sessions)} sessions are open, the most that "
                "rollout.agent.gateway.max_sessions allows"
            )
        key = f"sk-{secrets.token_urlsafe(24)}"
        session = self._sessions[key] = AgentSession(scope, self._shared)
        return key, session

    async def close_session(self, key: str) -> None:
        """Refuse further requests of a session and end the running ones."""
        session = self._sessions.pop(key, None)
        if session is not None:
            await session.close()
            if self._connections is not None:
                self._connections.close_session(key)

    async def _serve(
        self,
        http: web.Request,
        dialect: Dialect,
        handle: Callable[[web.Request, str, AgentSession], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Answer a request of a session, or with an error of the dialect."""
        assert self._connections is not None
        try:
            key, session = self._find_session(http)
            with self._connections.running(http, key):
                return await handle(http, key, session)
        except GatewayError as error:
            return _error_response(dialect, error)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        dialect = _dialect_of(http)
        return await self._serve(http, dialect, partial(self._answer, dialect))

    async def _answer(
        self, dialect: Dialect, http: web.Request, key: str, session: AgentSession
    ) -> web.StreamResponse:
        is_retry = _is_retry(http)
        with session.entering(is_retry=is_retry):
            async with self._received(http, key) as body:
                read = partial(_read, dialect.parse_request, body, session)
                request, answering = await session.admit(
                    read, len(body), body.count(b"{"), is_retry=is_retry
                )
        self._record(request, session)
        if request.streams:
            return await _send_stream(http, dialect, session, request, answering)
        answer = await answering
        body_json = dialect.render_answer(answer, request)
        response = _json_response(body_json, headers=_warning_headers(request))
        await response.prepare(http)
        await response.write_eof()  # raises if the client has gone away
        session.mark_delivered(answer)
        return response

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, _ANTHROPIC, self._answer_count)

    async def _answer_count(
        self, http: web.Request, key: str, session: AgentSession
    ) -> web.StreamResponse:
        with session.entering():
            async with self._received(http, key) as body:
                read = partial(_read, _ANTHROPIC.parse_count_request, body, session)
                request, count = await session.count_tokens(read, len(body), body.count(b"{"))
        return _json_response({"input_tokens": count}, headers=_warning_headers(request))

    async def _list_models(self, http: web.Request) -> web.StreamResponse:
        async def answer(*_: Any) -> web.StreamResponse:
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "mega_agentrl"}
            return _json_response({"object": "list", "data": [model]})

        return await self._serve(http, _OPENAI, answer)

    async def _list_tools(self, http: web.Request) -> web.StreamResponse:
        """Answer with the schemas of the run's tools, as the field `tools` of a request."""

        async def answer(_: web.Request, __: str, session: AgentSession) -> web.StreamResponse:
            return _json_response(list(session.scope.prompt.tool_schemas))

        return await self._serve(http, _OPENAI, answer)

    async def _call_tool(self, http: web.Request) -> web.StreamResponse:
        """Run a tool of the run; the body has its arguments."""
        return await self._serve(http, _OPENAI, self._answer_call)

    async def _answer_call(
        self, http: web.Request, key: str, session: AgentSession
    ) -> web.StreamResponse:
        with session.entering():
            async with self._received(http, key, MAX_ARGUMENT_BYTES) as body:
                check_decoding_work(body, 0)
                decode = partial(decode_body, body, dict)
                arguments = await self._shared.threads.run(decoding_work(len(body), 0), decode)
        outcome = await session.call_tool(http.match_info["tool"], arguments)
        return _json_response({"answer": outcome.answer, "status": str(outcome.status)})

    def _record(self, request: ChatRequest, session: AgentSession) -> None:
        self._ignored_fields.record(request.ignored)
        session.requests.record(request.ignored)

    @asynccontextmanager
    async def _received(
        self, http: web.Request, key: str, limit: int | None = None
    ) -> AsyncIterator[Body]:
        """Receive a body, whose bytes are in flight until the end of the `async with`.

        Raises:
            GatewayError: it is too large or compressed, or not received in time.
        """
        limit = limit or self._settings.max_body_mib * _MIB
        num_bytes = http.content_length
        if num_bytes is None:
            num_bytes = limit if http.body_exists else 0
        if num_bytes > limit:
            raise _too_large(num_bytes, limit)
        if (coding := http.headers.get("content-encoding", "identity")) != "identity":
            message = f"content-encoding: got {coding[:80]!r}, expected a body without compression"
            raise GatewayError(ErrorKind.invalid_request, message)
        if not self._in_flight.take(key, num_bytes):
            await self._wait_for_memory(key, num_bytes)
        try:
            yield await _read_body(http, limit)
        finally:
            self._in_flight.give_back(key, num_bytes)

    async def _wait_for_memory(self, key: str, num_bytes: int) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await self._in_flight.acquire(key, num_bytes)
        except TimeoutError as error:
            message = "the requests that are being received hold all memory for them"
            raise GatewayError(ErrorKind.overloaded, message) from error

    def _find_session(self, http: web.Request) -> tuple[str, AgentSession]:
        """Return the key of a request and its session; keys are compared by hash."""
        token = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        for key in (http.match_info.get("key", ""), http.headers.get("x-api-key", ""), token):
            session = self._sessions.get(key)
            if session is not None:
                return key, session
        raise GatewayError(
            ErrorKind.unknown_key,
            "the API key names no open session; expected the `api_key` that the agent was given",
        )


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer in the API's own form where no handler does, such as for unknown addresses."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status = error.status
        message = f"{request.method} {request.path[:200]}: {error.reason}; served are {_SERVED}"
    except Exception as error:
        if isinstance(error, ConnectionError) or _HAS_BEGUN in request:
            raise  # the client has gone away, or it has the head of a stream
        request.app[_HTTP_LOG].log_failure(f"{request.method} {request.path}")
        status, message = 500, "the gateway has an error; logs/driver.log has its traceback"
    kind = ErrorKind.not_found if status in (404, 405) else ErrorKind.invalid_request
    dialect = _ANTHROPIC if "/v1/messages" in request.path else _OPENAI
    return _error_response(dialect, GatewayError(kind, message), status)


def _dialect_of(http: web.Request) -> Dialect:
    path = http.path
    if "key" in http.match_info:
        path = path.removeprefix(f"/sessions/{http.match_info['key']}")
    return _DIALECTS[path]


async def _read_body(http: web.Request, limit: int) -> Body:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while chunk := await http.content.readany():
                body += chunk
                if len(body) > limit:
                    raise _too_large(len(body), limit)
    except TimeoutError as error:
        raise GatewayError(
            ErrorKind.invalid_request, f"body: not complete within {BODY_TIMEOUT_S:g} s"
        ) from error
    except web.RequestPayloadError as error:
        raise GatewayError(ErrorKind.invalid_request, "body: it is not HTTP") from error
    return body


def _read(parse: Callable[[Body], ChatRequest], body: Body, session: AgentSession) -> ChatRequest:
    """Return the request of a body, the cost of whose decoding is checked first."""
    check_decoding_work(body, session.scope.context.max_model_len)
    return parse(body)


def _too_large(num_bytes: int, limit: int) -> GatewayError:
    return GatewayError(
        ErrorKind.too_large,
        f"body: got {num_bytes} bytes or more, expected at most {limit}; for requests to the "
        "policy rollout.agent.gateway.max_body_mib sets the limit",
    )


def _is_retry(http: web.Request) -> bool:
    """Return whether the client's SDK sends the request again."""
    return http.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _warning_headers(request: ChatRequest) -> dict[str, str]:
    texts = [f"{name} has no effect: {reason}" for name, reason in request.ignored.items()]
    return {WARNING_HEADER: "; ".join(texts)} if texts else {}


def _json_response(
    body: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    content = encode_json(body)
    return web.Response(
        status=status, body=content, content_type="application/json", headers=headers
    )


def _error_response(
    dialect: Dialect, error: GatewayError, other_status: int | None = None
) -> web.Response:
    status, body = dialect.render_error(error)
    headers = {"x-should-retry": "true" if error.kind.is_retryable else "false"}
    return _json_response(body, status=other_status or status, headers=headers)


async def _send_stream(
    http: web.Request,
    dialect: Dialect,
    session: AgentSession,
    request: ChatRequest,
    answering: asyncio.Future[ChatAnswer],
) -> web.StreamResponse:
    """Send the head at once, keep-alive events while the answer is sampled, then the answer."""
    # A request that fails soon gets an ordinary error, with its status.
    await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
    if answering.done() and isinstance(error := answering.exception(), GatewayError):
        raise error
    headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
    response = web.StreamResponse(headers=headers | _warning_headers(request))
    try:
        await response.prepare(http)
        http[_HAS_BEGUN] = True
        while not answering.done():
            await response.write(dialect.keep_alive)
            await asyncio.wait({answering}, timeout=KEEP_ALIVE_S)
        answer = await answering
        for event in dialect.render_events(answer, request):
            await response.write(event)
        await response.write_eof()
        session.mark_delivered(answer)
    except GatewayError as error:
        await response.write(dialect.render_error_event(error))
        await response.write_eof()
    finally:
        answering.cancel()
    return response

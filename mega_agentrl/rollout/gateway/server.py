"""The HTTP server of the gateway: OpenAI's and Anthropic's APIs, in the process of the rollouts.

A session is named by its key, which the client sends as its API key (`Authorization: Bearer KEY` or
`x-api-key: KEY`) or as part of the base URL (`/sessions/KEY/v1`). Keys are random, and requests
with another key are refused. The server listens on the loopback interface unless told otherwise,
and on a Unix socket for agents in sandboxes, which have no network.

The size of a body, the time to send it, the number of sessions and the running requests of a
session are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.dialects.anthropic import AnthropicMessages
from mega_agentrl.rollout.gateway.dialects.base import decode_body, encode_json
from mega_agentrl.rollout.gateway.dialects.openai_chat import OpenAIChat
from mega_agentrl.rollout.gateway.dialects.openai_responses import OpenAIResponses
from mega_agentrl.rollout.gateway.ignored_fields import IgnoredFields
from mega_agentrl.rollout.gateway.session import AgentSession
from mega_agentrl.rollout.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler

    from mega_agentrl.rollout.gateway.chat import ChatAnswer, ChatRequest
    from mega_agentrl.rollout.gateway.dialects.base import Dialect
    from mega_agentrl.rollout.gateway.session import SessionScope

KEEP_ALIVE_S = 10.0
"""Time between the events of a stream whose answer is being sampled."""

BODY_TIMEOUT_S = 60.0
"""Time that a client has to send a body."""

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
_MIB = 2**20
_log = logging.getLogger(__name__)


class Gateway:
    """Serves the sessions of a run; `start` it on the event loop of the rollouts."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        self._settings = settings or GatewaySettings()
        self._sessions: dict[str, AgentSession] = {}
        self._ignored_fields = IgnoredFields()
        self._runner: web.AppRunner | None = None
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

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be used.
        """
        app = web.Application(
            client_max_size=self._settings.max_body_mib * _MIB, middlewares=[_errors_as_json]
        )
        for prefix in ("", "/sessions/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._list_models)
            app.router.add_get(f"{prefix}/v1/tools", self._list_tools)
            app.router.add_post(f"{prefix}/v1/tools/{{tool}}", self._call_tool)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
            for path in _DIALECTS:
                app.router.add_post(prefix + path, self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        host = self._settings.host
        site = web.TCPSite(self._runner, host, self._settings.port, backlog=1024)
        await site.start()
        # The sandbox's user must reach the socket; the keys keep others out.
        self._folder = Path(tempfile.mkdtemp(prefix="gateway-"))
        self._folder.chmod(0o711)
        await web.UnixSite(self._runner, str(self.socket_path), backlog=1024).start()
        self.socket_path.chmod(0o666)
        port = self._runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._ignored_fields.report_rest()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
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
        session = self._sessions[key] = AgentSession(scope)
        return key, session

    async def close_session(self, key: str) -> None:
        """Refuse further requests of a session and end the running ones."""
        session = self._sessions.pop(key, None)
        if session is not None:
            await session.close()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        dialect = _dialect_of(http)
        try:
            session = self._find_session(http)
            request = dialect.parse_request(await _read_body(http))
            self._ignored_fields.record(request.ignored)
            session.requests.record(request.ignored)
            if request.streams:
                return await _send_stream(http, dialect, session, request)
            answer = await session.complete(request, is_retry=_is_retry(http))
        except GatewayError as error:
            return _error_response(dialect, error)
        body = dialect.render_answer(answer, request)
        response = _json_response(body, headers=_warning_headers(request))
        await response.prepare(http)
        await response.write_eof()  # raises if the client has gone away
        session.mark_delivered(answer)
        return response

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        try:
            session = self._find_session(http)
            request = _ANTHROPIC.parse_count_request(await _read_body(http))
            count = await session.count_tokens(request)
        except GatewayError as error:
            return _error_response(_ANTHROPIC, error)
        return _json_response({"input_tokens": count}, headers=_warning_headers(request))

    async def _list_models(self, http: web.Request) -> web.StreamResponse:
        try:
            self._find_session(http)
        except GatewayError as error:
            return _error_response(_OPENAI, error)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "mega_agentrl"}
        return _json_response({"object": "list", "data": [model]})

    async def _list_tools(self, http: web.Request) -> web.StreamResponse:
        """Answer with the schemas of the run's tools, as the field `tools` of a request."""
        try:
            session = self._find_session(http)
        except GatewayError as error:
            return _error_response(_OPENAI, error)
        return _json_response(list(session.scope.prompt.tool_schemas))

    async def _call_tool(self, http: web.Request) -> web.StreamResponse:
        """Run a tool of the run; the body has its arguments."""
        try:
            session = self._find_session(http)
            arguments = decode_body(await _read_body(http), dict)
            outcome = await session.call_tool(http.match_info["tool"], arguments)
        except GatewayError as error:
            return _error_response(_OPENAI, error)
        return _json_response({"answer": outcome.answer, "status": str(outcome.status)})

    def _find_session(self, http: web.Request) -> AgentSession:
        """Return the session whose key the request has; keys are compared by hash."""
        token = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        for key in (http.match_info.get("key", ""), http.headers.get("x-api-key", ""), token):
            session = self._sessions.get(key)
            if session is not None:
                return session
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
        _log.exception("%s %s failed", request.method, request.path)
        status, message = 500, "the gateway has an error; logs/driver.log has its traceback"
    kind = ErrorKind.not_found if status in (404, 405) else ErrorKind.invalid_request
    dialect = _ANTHROPIC if "/v1/messages" in request.path else _OPENAI
    return _error_response(dialect, GatewayError(kind, message), status)


def _dialect_of(http: web.Request) -> Dialect:
    path = http.path
    if "key" in http.match_info:
        path = path.removeprefix(f"/sessions/{http.match_info['key']}")
    return _DIALECTS[path]


async def _read_body(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise GatewayError(
            ErrorKind.too_large,
            f"body: got {error.text or 'too many bytes'}; rollout.agent.gateway.max_body_mib "
            "sets the limit",
        ) from error
    except TimeoutError as error:
        raise GatewayError(
            ErrorKind.invalid_request, f"body: not complete within {BODY_TIMEOUT_S:g} s"
        ) from error


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
    http: web.Request, dialect: Dialect, session: AgentSession, request: ChatRequest
) -> web.StreamResponse:
    """Send the head at once, keep-alive events while the answer is sampled, then the answer."""
    task = asyncio.create_task(session.complete(request, is_retry=_is_retry(http)))
    # A request that is refused gets an ordinary error, with its status.
    await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
    if task.done() and isinstance(error := task.exception(), GatewayError):
        raise error
    headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
    response = web.StreamResponse(headers=headers | _warning_headers(request))
    try:
        await response.prepare(http)
        http[_HAS_BEGUN] = True
        while not task.done():
            await response.write(dialect.keep_alive)
            await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
        answer: ChatAnswer = await task
        for event in dialect.render_events(answer, request):
            await response.write(event)
        await response.write_eof()
        session.mark_delivered(answer)
    except GatewayError as error:
        await response.write(dialect.render_error_event(error))
        await response.write_eof()
    finally:
        task.cancel()
    return response

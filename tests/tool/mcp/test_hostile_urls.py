"""A server with a URL that sends too much, packs it, redirects elsewhere or never ends."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager

import pytest

from mega_agentrl.tool.base import ToolInputError
from mega_agentrl.tool.mcp import http_client
from mega_agentrl.tool.mcp.bounds import MAX_CONTENT_BLOCKS, MAX_MESSAGE_BYTES
from mega_agentrl.tool.mcp.connection import START_TIMEOUT_S, McpConnection, McpServerError
from mega_agentrl.tool.mcp.server_file import McpServerConfig

JSON = "application/json"
EVENTS = "text/event-stream"


def response(body=b"", kind=JSON, status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if kind != EVENTS:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(request, **result):
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode()


def texts(*values):
    return [{"type": "text", "text": value} for value in values]


class HostileUrl:
    """A web server whose answers to calls a test gives, as bytes of HTTP or a list of parts.

    Args:
        reply: Returns the answer to a request of JSON-RPC.
    """

    def __init__(self, reply):
        self._reply = reply
        self.requests = []
        self.num_open = 0

    async def serve(self, reader, writer):
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append((head.split(" ")[0], headers))
            parts = self._parts(
                json.loads(body) if body else {"method": head.split(" ")[0]}, headers
            )
            for part in parts if isinstance(parts, list) else [parts]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
                if part == b"":
                    await reader.read()  # until the client hangs up
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    def _parts(self, request, headers):
        match request["method"]:
            case "initialize":
                version = request["params"]["protocolVersion"]
                info = {"name": "hostile", "version": "1"}
                body = answer(request, protocolVersion=version, capabilities={}, serverInfo=info)
                return response(body, Mcp_Session_Id="7")
            case "tools/call" | "GET":
                return self._reply(request, headers)
            case _:
                return response(status="202 Accepted")


def shorten_the_wait_for_answers(monkeypatch):
    """To 1.5 s: the handshake waits no longer either, on a busy machine too."""
    monkeypatch.setattr(http_client, "_ANSWER_MARGIN_S", 1.5 - START_TIMEOUT_S)


@asynccontextmanager
async def connected(reply, *, timeout_s=60.0, shows_images=False, headers=()):
    hostile = HostileUrl(reply)
    listener = await asyncio.start_server(hostile.serve, "127.0.0.1", 0)
    hostile.port = listener.sockets[0].getsockname()[1]
    config = McpServerConfig(
        name="web",
        key="web",
        url=f"http://127.0.0.1:{hostile.port}/mcp",
        timeout_s=timeout_s,
        headers=dict(headers),
    )
    connection = McpConnection(config, shows_images=shows_images)
    try:
        await connection.open()
        yield connection, hostile
    finally:
        await connection.close()
        listener.close()


def good(request, headers):
    return response(answer(request, content=texts("fine")))


async def test_a_packed_answer_is_not_unpacked():
    """A mebibyte of it would become a gibibyte."""

    def reply(request, headers):
        assert headers["accept-encoding"] == "identity"
        packed = gzip.compress(answer(request, content=texts("a")))
        return response(packed, Content_Encoding="gzip")

    async with connected(reply, headers={"Accept-Encoding": "gzip"}) as (connection, _):
        with pytest.raises(McpServerError) as caught:
            await connection.call("a", {})
        assert "gzip" in str(caught.value)
        assert not connection.is_lost


@pytest.mark.parametrize("kind", [JSON, EVENTS])
@pytest.mark.parametrize(
    ("extra_bytes", "shows_images", "is_refused"),
    [
        pytest.param(0, False, False, id="short"),
        pytest.param(MAX_MESSAGE_BYTES, False, True, id="long"),
        pytest.param(MAX_MESSAGE_BYTES, True, True, id="long_text_where_images_may_be"),
        pytest.param(17 * MAX_MESSAGE_BYTES, True, True, id="huge"),
    ],
)
async def test_a_long_answer_fails_its_call_only(kind, extra_bytes, shows_images, is_refused):
    def reply(request, headers):
        body = answer(request, content=texts("fine", "." * extra_bytes))
        return response(body if kind == JSON else b"data: " + body + b"\n\n", kind)

    async with connected(reply, shows_images=shows_images) as (connection, _):
        if is_refused:
            with pytest.raises(ToolInputError) as caught:
                await connection.call("a", {})
            assert "MiB" in str(caught.value)
        else:
            assert (await connection.call("a", {})).content[0].text == "fine"
        assert not connection.is_lost


async def test_images_may_be_longer_than_texts():
    image = {"type": "image", "data": "AAAA" * MAX_MESSAGE_BYTES, "mimeType": "image/png"}

    def reply(request, headers):
        return response(answer(request, content=[image]))

    async with connected(reply, shows_images=True) as (connection, _):
        (block,) = (await connection.call("a", {})).content
        assert block.data == image["data"]


async def test_events_without_an_end_are_counted():
    def reply(request, headers):
        return [response(kind=EVENTS), *[b": " + b"x" * 100_000 + b"\n\n"] * 30, b""]

    async with connected(reply) as (connection, _):
        with pytest.raises(ToolInputError):
            await connection.call("a", {})
        assert not connection.is_lost


async def test_an_answer_may_come_after_other_events_in_any_line_ending():
    def reply(request, headers):
        log = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}'
        body = answer(request, content=texts("fine"))
        events = (
            b": hello\r\n\r\nretry: 0\r\ndata: " + log + b"\r\n\r\nid: 3\rdata: " + body + b"\r\r"
        )
        return [response(kind=EVENTS), *(events[i : i + 1] for i in range(len(events)))]

    async with connected(reply) as (connection, _):
        assert (await connection.call("a", {})).content[0].text == "fine"


async def test_a_stream_that_ends_without_an_answer_is_not_opened_again_without_end(monkeypatch):
    """A server may ask for the next connection at once, and never answer."""
    shorten_the_wait_for_answers(monkeypatch)

    def reply(request, headers):
        return response(b"id: 1\nretry: 0\ndata:\n\n", EVENTS)

    async with connected(reply, timeout_s=0.2) as (connection, hostile):
        with pytest.raises((ToolInputError, McpServerError)):
            async with asyncio.timeout(30):
                await connection.call("a", {})
        assert len(hostile.requests) <= 5


async def test_a_call_that_is_never_answered_leaves_no_connection(monkeypatch):
    shorten_the_wait_for_answers(monkeypatch)

    def reply(request, headers):
        return [b""]

    async with connected(reply, timeout_s=0.2) as (connection, hostile):
        with pytest.raises(ToolInputError):
            await connection.call("a", {})
        while hostile.num_open:
            await asyncio.sleep(0.01)
        assert not connection.is_lost


async def test_a_redirect_elsewhere_is_not_followed_and_its_body_is_not_read():
    elsewhere = HostileUrl(good)
    listener = await asyncio.start_server(elsewhere.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]

    def reply(request, headers):
        assert headers["authorization"] == "secret"
        url = f"http://127.0.0.1:{port}/mcp"
        return response(b"x" * 3_000_000, status="307 Temporary Redirect", Location=url)

    async with connected(reply, headers={"Authorization": "secret"}) as (connection, _):
        with pytest.raises(McpServerError):
            await connection.call("a", {})
    assert elsewhere.requests == []
    listener.close()


async def test_messages_outside_of_calls_are_not_asked_for():
    async with connected(good) as (connection, hostile):
        await connection.call("a", {})
        await asyncio.sleep(0)
        assert "get" not in {method.lower() for method, _ in hostile.requests}


async def test_cookies_do_not_pile_up():
    def reply(request, headers):
        cookies = "".join(f"Set-Cookie: c{number}=1\r\n" for number in range(100))
        return good(request, headers).replace(b"Content-Type", cookies.encode() + b"Content-Type")

    async with connected(reply) as (connection, hostile):
        for _ in range(2):
            await connection.call("a", {})
        assert len(hostile.requests[-1][1].get("cookie", "").split(";")) <= 64


async def test_blocks_beyond_the_limit_are_left_out_with_a_note():
    def reply(request, headers):
        return response(answer(request, content=texts(*map(str, range(300)))))

    async with connected(reply) as (connection, _):
        content = (await connection.call("a", {})).content
    assert [block.text for block in content[-2:]] == ["255", "[44 more blocks not shown]"]
    assert len(content) == MAX_CONTENT_BLOCKS + 1


async def test_a_session_that_the_server_has_ended_is_lost():
    def reply(request, headers):
        return response(status="404 Not Found")

    async with connected(reply) as (connection, _):
        with pytest.raises(McpServerError):
            await connection.call("a", {})
        assert connection.is_lost


async def test_an_answer_to_another_request_ends_no_call():
    def reply(request, headers):
        return response(answer({"id": 77}, content=texts("fine")))

    async with connected(reply) as (connection, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connection.call("a", {})
        assert not connection.is_lost

"""A web server on 127.0.0.1 whose answers a test gives, and a codec that counts words."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class ReceivedRequest:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    """What the server sends back."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class LocalServer:
    """A running server and the requests that arrived, in order."""

    port: int
    requests: list[ReceivedRequest]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(make_reply: Callable[[ReceivedRequest], Reply]) -> Iterator[LocalServer]:
    """Serve on a free port until the end of the block."""
    requests: list[ReceivedRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def respond(self):
            length = int(self.headers.get("content-length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            requests.append(
                ReceivedRequest(self.command, self.path, headers, self.rfile.read(length))
            )
            reply = make_reply(requests[-1])
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # who asked may have given up
                self.end_headers()
                self.wfile.write(reply.body)

        do_GET = respond
        do_POST = respond

        def log_message(self, *_):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield LocalServer(server.server_address[1], requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class WordCodec:
    """A token is a word; what a budget means is then plain to see."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, token_ids) -> str:
        raise AssertionError("the tests do not decode")

"""Bounds of the sizes and numbers of a server's messages, whatever the transport.

The size of a message is checked before it is parsed. A parser does not let another thread run, so
that what is parsed must be small: 1 MiB, or 16 MiB of which all but 1 MiB are the letters and
digits of images. Of the messages that are no answers only requests reach the SDK, without their
parameters: a session asks for no progress and for no log, and offers neither sampling nor
elicitation.
"""

from __future__ import annotations

import asyncio
import json
import string
from typing import Any

import mcp_types

MAX_MESSAGE_BYTES = 1 << 20
"""Longest message; a listing of 100 tools has about 200 KiB."""
MAX_IMAGE_MESSAGE_BYTES = 16 << 20
"""Longest message where the model sees images: images of 12 MiB together, in base 64."""
MAX_BRACKETS = 100_000
"""Opening brackets of a message, in texts as well: as many lists and objects take some 30 ms to
parse. A mebibyte of source code has some 30,000."""
MAX_COMMAS = 400_000
"""Commas of a message, in texts as well. A mebibyte of a table has some 250,000."""
MAX_CONTENT_BLOCKS = 256
"""Blocks of an answer that are shown; SDKs make a block of each item of a list."""
MAX_ERROR_CHARS = 2_000
"""Shown part of a server's error message."""
MAX_OTHER_MESSAGES = 10_000
"""Messages, and lines that are none, between two answers; some tools log each row that they read.
Half an hour of silence allows as many again."""
MAX_SERVER_REQUESTS = 100
"""Requests of a server between two answers, each of which waits in memory until it is answered."""
ANSWER_REFUSED = -32099
"""Error code, of those that JSON-RPC leaves to implementations, of an answer that is not read."""

_MAX_HANDSHAKE_CHARS = 64 << 10
"""Characters of a server's answer to the handshake, which is kept as long as the session."""
_UNUSED_KEYS = {"_meta", "instructions"}
_MAX_ID_CHARS = 256
_MAX_METHOD_CHARS = 64
_IMAGE_BYTES = (string.ascii_letters + string.digits + "+/=").encode()


class ServerFloodError(RuntimeError):
    """A server sends more messages than it may; the session ends."""


def size_problem(message: bytes | bytearray, max_bytes: int) -> str:
    """Return why a message is not parsed; empty if it may be."""
    if len(message) > max_bytes:
        return too_long(max_bytes)
    if len(message) > MAX_MESSAGE_BYTES:
        num_others = len(message.translate(None, _IMAGE_BYTES))
        if num_others > MAX_MESSAGE_BYTES:
            return too_long(MAX_MESSAGE_BYTES)
    num_brackets = message.count(b"[") + message.count(b"{")
    if num_brackets > MAX_BRACKETS or message.count(b",") > MAX_COMMAS:
        return "The answer of the tool has too many parts. Ask for less."
    return ""


def too_long(max_bytes: int) -> str:
    """Return the text for the policy of an answer that is longer than allowed."""
    return f"The answer of the tool is longer than {max_bytes >> 20} MiB. Ask for less."


def refusal(request_id: int | str, text: str) -> mcp_types.JSONRPCError:
    """Return the error that stands for an answer which is not read."""
    error = mcp_types.ErrorData(code=ANSWER_REFUSED, message=text)
    return mcp_types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error)


class _Allowance:
    """A number of messages that grows back with time, up to its maximum."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._left = float(maximum)
        self._time = asyncio.get_running_loop().time()

    def spend(self) -> None:
        now = asyncio.get_running_loop().time()
        grown = (now - self._time) * self._maximum / 1800
        self._left, self._time = min(self._maximum, self._left + grown) - 1, now
        if self._left < 0:
            raise ServerFloodError(f"it sent more than {self._maximum} messages without an answer")

    def refill(self) -> None:
        self._left = self._maximum


class MessageFilter:
    """Decides which messages of a server a session sees, and in which form."""

    def __init__(self) -> None:
        self._others = _Allowance(MAX_OTHER_MESSAGES)
        self._requests = _Allowance(MAX_SERVER_REQUESTS)
        self._is_open = False
        self._pages: list[list[Any]] | None = None

    def note_answer(self) -> None:
        """Record that a request was answered."""
        self._others.refill()
        self._requests.refill()

    def note_other(self) -> None:
        """Count a line that is no message; raises `ServerFloodError`."""
        self._others.spend()

    def start_listing(self) -> None:
        """Take the tools out of the answers from now on, until `take_listing`."""
        self._pages = []

    def take_listing(self) -> list[Any]:
        """Return the tools of all pages since `start_listing`, as the server describes them."""
        pages, self._pages = self._pages or [], None
        return [tool for page in pages for tool in page]

    def filter(self, message: mcp_types.JSONRPCMessage) -> mcp_types.JSONRPCMessage | None:
        """Return a message as the session may see it, or None; raises `ServerFloodError`."""
        self._others.spend()
        match message:
            case mcp_types.JSONRPCResponse():
                return self._filter_answer(message)
            case mcp_types.JSONRPCError(id=request_id, error=error):
                short = mcp_types.ErrorData(code=error.code, message=error.message)
                return mcp_types.JSONRPCError(jsonrpc="2.0", id=request_id, error=short)
            case mcp_types.JSONRPCRequest(id=request_id, method=method):
                self._requests.spend()
                if isinstance(request_id, str) and len(request_id) > _MAX_ID_CHARS:
                    return None
                short_method = method[:_MAX_METHOD_CHARS]
                return mcp_types.JSONRPCRequest(jsonrpc="2.0", id=request_id, method=short_method)
            case _:
                return None

    def _filter_answer(self, answer: mcp_types.JSONRPCResponse) -> mcp_types.JSONRPCMessage:
        result = answer.result
        for key in result.keys() & _UNUSED_KEYS:
            del result[key]
        if not self._is_open:  # the first answer is that of the handshake
            self._is_open = True
            if len(json.dumps(result)) > _MAX_HANDSHAKE_CHARS:
                return refusal(answer.id, "what it says of itself is too long")
        if self._pages is not None and isinstance(tools := result.get("tools"), list):
            self._pages.append(tools)
            result["tools"] = []
        blocks = result.get("content")
        if isinstance(blocks, list) and len(blocks) > MAX_CONTENT_BLOCKS:
            num_left_out = len(blocks) - MAX_CONTENT_BLOCKS
            note = {"type": "text", "text": f"[{num_left_out} more blocks not shown]"}
            result["content"] = [*blocks[:MAX_CONTENT_BLOCKS], note]
        return answer

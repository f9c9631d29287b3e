"""Reads the messages of a server process, one a line, from its standard output.

A server may print anything between its messages: a line that is no message is ignored. A message
that is too long is skipped, and where it begins or ends with the number of the request that it
answers, an error takes its place; without one nobody would know which call has to end, and the
session is lost.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import mcp_types

from mega_agentrl.tool.mcp.bounds import MAX_MESSAGE_BYTES, refusal, size_problem, too_long

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MAX_SKIPPED_BYTES = 256 << 20
"""Longest message that is skipped."""

_NUM_LARGE_MESSAGES = 4
"""Messages of more than 1 MiB that are read at a time, over all servers: 64 MiB in all."""
_LARGE_MESSAGE_TIMEOUT_S = 10.0
"""Time for the rest of such a message, so that a server cannot keep others waiting."""
_NUM_END_BYTES = 200
_NUMBER_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\s*,')
_NUMBER_LAST = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')
_METHOD_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"method"\s*:')

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class ServerOutputError(RuntimeError):
    """The output of a server has ended, or cannot be read any further."""


async def read_messages(
    stdout: asyncio.StreamReader, max_bytes: int, on_other_line: Callable[[], None]
) -> AsyncIterator[mcp_types.JSONRPCMessage]:
    """Yield the messages of a server.

    Args:
        stdout: Its output, whose limit is `MAX_MESSAGE_BYTES`.
        max_bytes: Longest message that is read.
        on_other_line: Called for each line that is no message; what it raises is passed on.

    Raises:
        ServerOutputError: There are no further messages.
    """
    while True:
        line = await _read_line(stdout, max_bytes)
        if isinstance(line, mcp_types.JSONRPCError):
            yield line
            continue
        if problem := size_problem(line, max_bytes):
            yield _refusal_of(line, line, problem)
            continue
        try:
            yield mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            on_other_line()
            await asyncio.sleep(0)  # a buffer full of lines must not hold up the event loop


async def _read_line(
    stdout: asyncio.StreamReader, max_bytes: int
) -> bytes | bytearray | mcp_types.JSONRPCError:
    """Return the next line, or the error that takes the place of a message that is too long."""
    try:
        return await stdout.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raise ServerOutputError("the server has ended") from error
    except asyncio.LimitOverrunError as error:
        start = await stdout.readexactly(error.consumed)
    if not start.lstrip()[:1] == b"{":
        raise ServerOutputError(f"it wrote a line of more than {MAX_MESSAGE_BYTES >> 20} MiB")
    if max_bytes <= MAX_MESSAGE_BYTES:
        return await _skip_message(stdout, start, max_bytes)
    slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_NUM_LARGE_MESSAGES))
    async with slots:
        try:
            async with asyncio.timeout(_LARGE_MESSAGE_TIMEOUT_S):
                return await _read_large_message(stdout, start, max_bytes)
        except TimeoutError as error:
            text = f"a message of more than {MAX_MESSAGE_BYTES >> 20} MiB was not complete within "
            raise ServerOutputError(f"{text}{_LARGE_MESSAGE_TIMEOUT_S:g} s") from error


async def _read_large_message(
    stdout: asyncio.StreamReader, start: bytes, max_bytes: int
) -> bytearray | mcp_types.JSONRPCError:
    message = bytearray(start)
    while not message.endswith(b"\n"):
        message += await _read_part(stdout)
        if len(message) > max_bytes and not message.endswith(b"\n"):
            return await _skip_message(stdout, bytes(message), max_bytes)
    return message


async def _skip_message(
    stdout: asyncio.StreamReader, start: bytes, max_bytes: int
) -> mcp_types.JSONRPCError:
    num_bytes, end = len(start), start[-_NUM_END_BYTES:]
    start = start[:_NUM_END_BYTES]
    while not end.endswith(b"\n"):
        part = await _read_part(stdout)
        num_bytes += len(part)
        end = (end + part)[-_NUM_END_BYTES:]
        if num_bytes > MAX_SKIPPED_BYTES:
            raise ServerOutputError(f"it wrote a line of more than {MAX_SKIPPED_BYTES >> 20} MiB")
    return _refusal_of(start, end, too_long(max_bytes))


async def _read_part(stdout: asyncio.StreamReader) -> bytes:
    """Return the rest of a line, or a part of it."""
    try:
        return await stdout.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raise ServerOutputError("the server has ended") from error
    except asyncio.LimitOverrunError as error:
        return await stdout.readexactly(error.consumed)


def _refusal_of(
    start: bytes | bytearray, end: bytes | bytearray, text: str
) -> mcp_types.JSONRPCError:
    """Return the error in place of a message, from its first and last bytes."""
    number = _NUMBER_FIRST.match(start[:_NUM_END_BYTES]) or _NUMBER_LAST.search(
        end[-_NUM_END_BYTES:]
    )
    if number is not None:
        return refusal(int(number[1]), text)
    if _METHOD_FIRST.match(start):
        return refusal("", text)  # it answers nothing, and no call waits for this number
    raise ServerOutputError(f"it wrote a line of more than {MAX_MESSAGE_BYTES >> 20} MiB")

"""One call that only reads, over HTTP: paced, retried, with a deadline over everything.

Consumes a way to send a request, produces its body. Waits for its start in the `Pace`, at most
the deadline, and then for the server, at most the deadline again; unblocked by the answer or by
either. What may pass is tried again with growing, jittered pauses: no connection, a broken one,
a resolver that is busy, 429 and the 5xx of an overloaded or restarting server. A server's
Retry-After holds back every call of the process. Anything else is final at the first time. Only
calls that may be repeated without harm belong here: GET, or a POST that only asks.
"""

from __future__ import annotations

import asyncio
import socket
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from mega_agentrl.tool.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NUM_RETRIES = 2
"""Further tries of search and browse after a failure that may pass."""

PASSING_STATUS = frozenset({429, 500, 502, 503, 504})

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_JITTER = wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S)


class StatusError(RuntimeError):
    """The server answered with an error. status: its HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class PassingError(RuntimeError):
    """A failure that may pass. pause_s: what the server asked to wait, None if it did not.

    status: its HTTP status, None where there was no answer.
    """

    def __init__(
        self, text: str, *, pause_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(text)
        self.pause_s = pause_s
        self.status = status


class WebCall:
    """Sends calls of one kind. timeout_s: of one call with its retries, after its start.

    calls_per_second: over the process, 0 for no limit.
    """

    def __init__(self, *, timeout_s: float, num_retries: int, calls_per_second: float) -> None:
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._pace = Pace(calls_per_second)

    async def run(self, send: Callable[[], Awaitable[str]]) -> str:
        """What `send` returns in the end.

        Raises `TimeoutError` past the deadline, `PaceError` where even the start would be, and
        the last error of `send`: `PassingError`, or what else it raises, at once.
        """
        await self._pace.wait(self._timeout_s)
        end_s = time.monotonic() + self._timeout_s
        tries = AsyncRetrying(
            retry=retry_if_exception_type(PassingError),
            stop=stop_after_attempt(self._num_retries + 1),
            wait=_pause_s,
            before_sleep=lambda state: self._hold_back(state, end_s),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in tries:
                    with attempt:
                        if attempt.retry_state.attempt_number > 1:
                            await self._pace.wait(self._timeout_s)
                        return await _typed(send)
        except TimeoutError as error:
            raise TimeoutError(f"Timed out after {self._timeout_s:g} s.") from error
        raise AssertionError("tenacity ends in a result or an error")

    def _hold_back(self, state: RetryCallState, end_s: float) -> None:
        """Pass a server's wish on to all; give up at once where it goes past the deadline."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, PassingError) and error.pause_s is not None:
            left_s = max(0.0, end_s - time.monotonic())
            self._pace.pause(min(error.pause_s, self._timeout_s))
            if error.pause_s > left_s:
                raise error


def check_status(response: httpx.Response, who: str) -> None:
    """Raise `PassingError` or `StatusError` unless the status is 200 to 299."""
    status = response.status_code
    if 200 <= status < 300:
        return
    text = f"{who} answered HTTP {status}"
    if status in PASSING_STATUS:
        pause_s = _retry_after_s(response.headers.get("retry-after", ""))
        raise PassingError(text, pause_s=pause_s, status=status)
    raise StatusError(status, text)


async def read_at_most(response: httpx.Response, max_bytes: int) -> bytes:
    """The body as it is sent, not unpacked; up to one piece more than `max_bytes`."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > max_bytes:
            break
    return bytes(body)


async def _typed(send: Callable[[], Awaitable[str]]) -> str:
    try:
        return await send()
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except (httpx.TransportError, socket.gaierror) as error:
        raise PassingError(f"{type(error).__name__}: {error}") from error


def _pause_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    wished_s = error.pause_s if isinstance(error, PassingError) else None
    return max(float(_JITTER(state)), wished_s or 0.0)


def _retry_after_s(value: str) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None

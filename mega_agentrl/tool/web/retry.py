"""Sends a read-only HTTP request with a rate limit, retries and a total deadline.

A call waits for its start in the `RateLimiter`, at most the timeout, and then for the server, at
most the timeout again. Transient failures are retried with growing, jittered pauses: refused or
broken connections, a busy resolver, status 429 and the 5xx of an overloaded or restarting server. A
server's Retry-After delays the calls of its host, at most by the timeout. Any other error is final.
Only calls that may be repeated are allowed: GET, or a POST that only reads.

A call that finds no free start within its timeout has timed out: who calls more often than the
limit allows learns it, and no trajectory is left out for it.

The limiter is not `aiolimiter`'s, which can neither refuse at once a wait that is too long nor
pause for a Retry-After.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

RETRYABLE_STATUSES = frozenset({429, 500, 502, 503, 504})

NUM_RETRIES = 2
"""Retries after a transient failure: one for a restarting server, one for a rate limit."""

_CACHE_TIMEOUT_S = 15.0
_MAX_PAUSED_HOSTS = 1_000
"""Hosts whose pauses are kept at a time; those that end first are forgotten."""
_MAX_RETRY_AFTER_S = 86_400.0
_MAX_RETRY_AFTER_CHARS = 64
_MIN_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0
_BACKOFF = wait_random_exponential(multiplier=_MIN_BACKOFF_S, max=_MAX_BACKOFF_S)


class RateLimitError(TimeoutError):
    """There is no free start time within the caller's maximum wait."""


class RateLimiter:
    """Spreads the calls of all threads and event loops of the process evenly over time.

    A caller reserves the next free start time and sleeps until then; the start of a cancelled
    caller is lost. A start time beyond the caller's maximum wait is refused at once instead of
    reserved, so that a backlog cannot hold start times for callers that have long given up. A call
    of a host that asked for a pause waits for its end first, and takes no start until then.

    Args:
        calls_per_second: the limit, 0 for none; `pause` applies nevertheless.
    """

    def __init__(self, calls_per_second: float) -> None:
        self._interval_s = 1 / calls_per_second if calls_per_second else 0.0
        self._lock = threading.Lock()
        self._next_start_s = 0.0
        self._pause_ends_s: dict[str, float] = {}

    async def acquire(self, max_wait_s: float, host: str = "") -> None:
        """Wait for the next start of a call to a host.

        Raises:
            RateLimitError: It is more than `max_wait_s` away.
        """
        with self._lock:
            pause_s = max(0.0, self._pause_ends_s.get(host, 0.0) - time.monotonic())
        if pause_s > max_wait_s:
            raise RateLimitError(
                f"The server asked for a pause of {pause_s:.3g} s more, longer than the "
                f"{max_wait_s:.3g} s that a call may wait."
            )
        if pause_s:
            await asyncio.sleep(pause_s)
        await self._wait_for_start(max_wait_s - pause_s)

    async def _wait_for_start(self, max_wait_s: float) -> None:
        with self._lock:
            now_s = time.monotonic()
            wait_s = max(0.0, self._next_start_s - now_s)
            if wait_s > max_wait_s:
                raise RateLimitError(
                    f"Too many calls are waiting: the next free start is {wait_s:.3g} s away, and "
                    f"a call may wait {max_wait_s:.3g} s. Try again later."
                )
            self._next_start_s = now_s + wait_s + self._interval_s
        if wait_s:
            await asyncio.sleep(wait_s)

    def pause(self, pause_s: float, host: str = "") -> None:
        """Let no call to a host start for `pause_s`."""
        with self._lock:
            now_s = time.monotonic()
            ends_s = self._pause_ends_s
            ends_s[host] = max(ends_s.get(host, 0.0), now_s + pause_s)
            if len(ends_s) > _MAX_PAUSED_HOSTS:
                first_host = min(ends_s, key=ends_s.__getitem__)
                del ends_s[first_host]


def total_timeout_s(timeout_s: float) -> float:
    """Return the deadline of a tool whose calls `RequestRetrier` limits to `timeout_s`.

    The retrier enforces that limit itself, once for the start of a call and once from then on.
    """
    return 2 * timeout_s + _CACHE_TIMEOUT_S


class HttpStatusError(RuntimeError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TransientError(RuntimeError):
    """A failure that a retry may resolve.

    Attributes:
        retry_after_s: the wait that the server asked for, or None.
        status: HTTP status, None if there was no response.
    """

    def __init__(
        self, text: str, *, retry_after_s: float | None = None, status: int | None = None
    ) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        self.status = status


class RequestRetrier:
    """Sends calls with a rate limit over all of them, retries and a deadline.

    Args:
        timeout_s: limit of one call and its retries, from its start.
        calls_per_second: limit over the process, 0 for none.
    """

    def __init__(self, *, timeout_s: float, calls_per_second: float) -> None:
        self._timeout_s = timeout_s
        self._rate_limiter = RateLimiter(calls_per_second)

    async def run(self, send: Callable[[], Awaitable[str]], host: str = "") -> str:
        """Call `send` until it succeeds and return its result.

        Args:
            send: sends one request.
            host: the host whose pauses the call keeps; empty where all calls go to one service.

        Raises:
            TimeoutError: the timeout has passed, or the call could not start within it.
            TransientError: the last retry failed. Any other error of `send` is raised at once.
        """
        await self._rate_limiter.acquire(self._timeout_s, host)
        deadline = time.monotonic() + self._timeout_s
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_attempt(NUM_RETRIES + 1),
            wait=_retry_wait_s,
            before_sleep=lambda state: self._apply_retry_after(state, deadline, host),
            reraise=True,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in attempts:
                    with attempt:
                        if attempt.retry_state.attempt_number > 1:
                            await self._rate_limiter.acquire(self._timeout_s, host)
                        return await _send_with_mapped_errors(send)
        except TimeoutError as error:
            raise TimeoutError(f"Timed out after {self._timeout_s:g} s.") from error
        raise AssertionError("tenacity ends in a result or an error")

    def _apply_retry_after(self, state: RetryCallState, deadline: float, host: str) -> None:
        """Delay the host's calls as it asked; give up at once if that exceeds the deadline."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, TransientError) and error.retry_after_s is not None:
            remaining_s = max(0.0, deadline - time.monotonic())
            self._rate_limiter.pause(min(error.retry_after_s, self._timeout_s), host)
            if error.retry_after_s > remaining_s:
                raise error


def raise_for_status(response: httpx.Response, who: str) -> None:
    """Raise `TransientError` or `HttpStatusError` unless the status is 200 to 299."""
    status = response.status_code
    if 200 <= status < 300:
        return
    text = f"{who} answered HTTP {status}"
    if status in RETRYABLE_STATUSES:
        retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
        raise TransientError(text, retry_after_s=retry_after_s, status=status)
    raise HttpStatusError(status, text)


async def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Read the body without decompression, up to one chunk more than `max_bytes`."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            break
    return bytes(body)


async def _send_with_mapped_errors(send: Callable[[], Awaitable[str]]) -> str:
    try:
        return await send()
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except (httpx.TransportError, socket.gaierror) as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error


def _retry_wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    retry_after_s = error.retry_after_s if isinstance(error, TransientError) else None
    return max(float(_BACKOFF(state)), retry_after_s or 0.0)


def _retry_after_s(value: str) -> float | None:
    """Parse a Retry-After header, a number or a date.

    Returns:
        Seconds, at most a day; None for any other text.
    """
    value = value.strip()
    if len(value) > _MAX_RETRY_AFTER_CHARS:
        return None
    if value.isascii() and value.isdigit():
        return min(float(value), _MAX_RETRY_AFTER_S)
    try:
        wait_s = parsedate_to_datetime(value).timestamp() - time.time()
    except (ArithmeticError, LookupError, OSError, TypeError, ValueError):
        return None
    return min(max(0.0, wait_s), _MAX_RETRY_AFTER_S)

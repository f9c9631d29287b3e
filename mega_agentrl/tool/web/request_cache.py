"""Web requests through the disk cache; equal concurrent requests are sent once.

The key of a response is a digest of everything it depends on. Only successful responses are stored:
an error is raised to every waiting caller, and the next call sends the request again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import unicodedata
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mega_agentrl.tool.blocking_calls import call_in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mega_agentrl.tool.web.disk_cache import DiskCache


class SingleFlight[ResultT]:
    """Runs work by key, at most once at a time per key, over all threads and event loops.

    The first caller starts the work as its own task, and every caller waits for its result. The
    work must have its own deadline. A cancelled caller leaves the work to the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[ResultT]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, key: str, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of the work in progress for that key, else of `work()`.

        Raises:
            RuntimeError: the event loop that ran the work ended first. Errors of the work are
                passed on.
        """
        with self._lock:
            future = self._futures.get(key)
            first = future is None
            if future is None:
                future = self._futures[key] = Future()
        if first:
            task = asyncio.ensure_future(self._run_shared(key, future, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def _run_shared(
        self, key: str, future: Future[ResultT], work: Callable[[], Awaitable[ResultT]]
    ) -> None:
        failure: BaseException | None = None
        try:
            result = await work()
        except asyncio.CancelledError:
            failure = RuntimeError("the event loop that ran the work has ended")
            raise
        except Exception as error:  # noqa: BLE001  raised to every waiting caller
            failure = error
        finally:
            with self._lock:
                del self._futures[key]
            if failure is not None:
                future.set_exception(failure)
        if failure is None:
            future.set_result(result)


class RequestCache:
    """Caches the text responses of requests.

    Args:
        cache: the disk cache; None sends every request, though equal concurrent ones still once.
    """

    def __init__(self, cache: DiskCache | None) -> None:
        self._cache = cache
        self._single_flight: SingleFlight[tuple[str, bool]] = SingleFlight()

    async def get_or_fetch(self, key: str, fetch: Callable[[], Awaitable[str]]) -> tuple[str, bool]:
        """Return the response and whether it came from the cache; raises what `fetch` raises."""
        return await self._single_flight.run(key, lambda: self._get_or_fetch(key, fetch))

    async def _get_or_fetch(
        self, key: str, fetch: Callable[[], Awaitable[str]]
    ) -> tuple[str, bool]:
        if self._cache is None:
            return await fetch(), False
        cached = await call_in_thread(self._cache.get, key)
        if cached is not None:
            return cached, True
        value = await fetch()
        await call_in_thread(self._cache.put, key, value)
        return value, False


def normalize_query(query: str) -> str:
    """Return the query in NFC, with single spaces and without unprintable characters."""
    composed = unicodedata.normalize("NFC", query.encode("utf-8", "replace").decode("utf-8"))
    words = " ".join(composed.split())
    return "".join(char for char in words if char.isprintable())


def cache_key(*parts: str | int) -> str:
    """Return a digest of what a response depends on, such as server, query and result count."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

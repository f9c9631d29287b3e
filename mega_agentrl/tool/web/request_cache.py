"""Web requests through the disk cache; equal concurrent requests are sent once.

The key of a response is a digest of everything it depends on. Only successful responses are stored:
an error is raised to every waiting caller, and the next call sends the request again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import unicodedata
from typing import TYPE_CHECKING

from mega_agentrl.tool.web.single_flight import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mega_agentrl.tool.web.disk_cache import DiskCache


class RequestCache:
    """Caches the text responses of requests.

    Args:
        cache: the disk cache; None sends every request, though equal concurrent ones still once.
    """

    def __init__(self, cache: DiskCache | None) -> None:
        self._cache = cache
        self._single_flight: SingleFlight[str] = SingleFlight()

    async def get_or_fetch(self, key: str, fetch: Callable[[], Awaitable[str]]) -> tuple[str, bool]:
        """Return the response and whether it came from the cache; raises what `fetch` raises."""
        if self._cache is not None:
            cached = await asyncio.to_thread(self._cache.get, key)
            if cached is not None:
                return cached, True
        return await self._single_flight.run(key, lambda: self._fetch_and_store(key, fetch)), False

    async def _fetch_and_store(self, key: str, fetch: Callable[[], Awaitable[str]]) -> str:
        value = await fetch()
        if self._cache is not None:
            await asyncio.to_thread(self._cache.put, key, value)
        return value


def normalize_query(query: str) -> str:
    """Return the query in NFC, with single spaces and without unprintable characters."""
    composed = unicodedata.normalize("NFC", query.encode("utf-8", "replace").decode("utf-8"))
    words = " ".join(composed.split())
    return "".join(char for char in words if char.isprintable())


def cache_key(*parts: str | int) -> str:
    """Return a digest of what a response depends on, such as server, query and result count."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

"""What is asked of the web goes through here: from the cache, else asked once and stored.

The key of an answer is a digest of everything it depends on. Only answers are stored: whatever
the asking raises is raised to everybody who waits, and asked anew next time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import unicodedata
from typing import TYPE_CHECKING

from mega_agentrl.tool.single_flight import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mega_agentrl.tool.cache import DiskCache


class CachedAsk:
    """cache: None asks every time, though equal questions at the same time still once."""

    def __init__(self, cache: DiskCache | None) -> None:
        self._cache = cache
        self._flights: SingleFlight[str] = SingleFlight()

    async def answer(self, key: str, ask: Callable[[], Awaitable[str]]) -> tuple[str, bool]:
        """The answer, and whether it came from the cache; raises what `ask` raises."""
        if self._cache is not None:
            known = await asyncio.to_thread(self._cache.get, key)
            if known is not None:
                return known, True
        return await self._flights.run(key, lambda: self._ask(key, ask)), False

    async def _ask(self, key: str, ask: Callable[[], Awaitable[str]]) -> str:
        value = await ask()
        if self._cache is not None:
            await asyncio.to_thread(self._cache.put, key, value)
        return value


def normalise(query: str) -> str:
    """The query as it is asked: one form per letter, single spaces, nothing unprintable."""
    composed = unicodedata.normalize("NFC", query.encode("utf-8", "replace").decode("utf-8"))
    words = " ".join(composed.split())
    return "".join(char for char in words if char.isprintable())


def cache_key(*parts: str | int) -> str:
    """Digest of what an answer depends on: the asked one's identity, query, number of results."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

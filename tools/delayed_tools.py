"""Tools with simulated latency, for the benchmarks of rollouts.

The latency of a call is drawn from a hash of its text, so that it is the same in every run:
log-normal with median 0.2 s and 99th percentile 5 s.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from hashlib import blake2b
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_agentrl.types.protocols import ToolProvider, ToolSession
    from mega_agentrl.types.records import ToolOutcome

MEDIAN_S, P99_S = 0.2, 5.0
SIGMA = math.log(P99_S / MEDIAN_S) / NormalDist().inv_cdf(0.99)


def latency_s(text: str) -> float:
    """Return the simulated latency of a call in seconds."""
    number = int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big")
    return MEDIAN_S * math.exp(SIGMA * NormalDist().inv_cdf((number + 0.5) / 2**48))


class DelayedTools:
    """Delays the answers of `tools` until the simulated latency, at most `max_latency_s`, is over.

    Attributes that are not defined here are those of `tools`.
    """

    def __init__(self, tools: ToolProvider, max_latency_s: float = math.inf) -> None:
        self._tools = tools
        self._max_latency_s = max_latency_s

    def open_session(self) -> ToolSession:
        """Open a session whose answers are delayed."""
        return DelayedToolSession(self._tools.open_session(), self._max_latency_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tools, name)


class DelayedToolSession:
    """A session of `DelayedTools`; attributes that are not defined here are those of `session`."""

    def __init__(self, session: ToolSession, max_latency_s: float) -> None:
        self._session = session
        self._max_latency_s = max_latency_s

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Execute the call and return its outcome once the simulated latency is over."""
        begin = time.perf_counter()
        delay_s = min(self._max_latency_s, latency_s(f"{tool} {dict(arguments)}"))
        outcome = await self._session.execute(tool, arguments)
        await asyncio.sleep(begin + delay_s - time.perf_counter())
        return outcome

    async def fork(self) -> DelayedToolSession:
        """Fork the session; the answers of the child are delayed too."""
        return DelayedToolSession(await self._session.fork(), self._max_latency_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

"""Whether an engine works: tokens against time, and what a start that failed died of.

An engine may answer every question and still be of no use, as its scheduler or a kernel hangs.
`Progress` sees the number of tokens it has sampled in its life; while requests run, that grows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from mega_agentrl.types.faults import EngineLostError

STUCK_S = 20.0
"""Seconds without a token while requests run, a long prefill included."""


class Progress:
    """Of one engine; seconds on `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_tokens = -1
        self._since_s = clock()

    def stuck_s(self, num_tokens: int, num_running: int) -> float | None:
        """Seconds without progress where these are too many, else None."""
        now = self._clock()
        if num_tokens != self._num_tokens or not num_running:
            self._num_tokens, self._since_s = num_tokens, now
            return None
        quiet_s = now - self._since_s
        return quiet_s if quiet_s > STUCK_S else None


def start_failure(name: str, error: RuntimeError) -> RuntimeError:
    """What to raise for vLLM's error of a start.

    `EngineLostError` where a signal may have ended its core, so that another start may succeed.
    vLLM says so in its text only: an exit code below 0, or none, as it looks before there is one.
    """
    killed = re.search(r"core proc\(s\): ({}|.*: -\d)", str(error))
    kind = EngineLostError if killed else RuntimeError
    return kind(f"{name} did not start; its log file has the reason: {error}")

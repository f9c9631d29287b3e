"""Detection of an engine that has stopped producing tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STUCK_TIMEOUT_S = 20.0
"""Seconds without a token, after which an engine with running requests is considered stuck.

A long prefill must end within this time.
"""


class ProgressMonitor:
    """Detects an engine that answers calls but samples no tokens, because its core hangs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = -1
        """Tokens at the last call of `stuck_s`."""
        self._clock = clock
        self._last_progress_s = clock()

    def stuck_s(self, num_tokens: int, num_running: int) -> float | None:
        """Return the seconds without progress if they exceed the timeout, else None.

        Args:
            num_tokens: Tokens that the engine has returned in its lifetime.
            num_running: Number of running requests.
        """
        now = self._clock()
        if num_tokens != self.num_tokens or not num_running:
            self.num_tokens, self._last_progress_s = num_tokens, now
            return None
        quiet_s = now - self._last_progress_s
        return quiet_s if quiet_s > STUCK_TIMEOUT_S else None

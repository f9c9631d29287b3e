"""Detection of an engine that has stopped producing tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ProgressMonitor:
    """Measures for how long an engine has sampled no tokens, because its core may hang."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = -1
        """Tokens at the last call of `quiet_s`."""
        self._clock = clock
        self._last_progress_s = clock()

    def quiet_s(self, num_tokens: int, num_running: int) -> float:
        """Return the seconds without a token; 0 if one has come or nothing runs.

        Args:
            num_tokens: Tokens that the engine has returned in its lifetime.
            num_running: Number of running requests.
        """
        now = self._clock()
        if num_tokens != self.num_tokens or not num_running:
            self.num_tokens, self._last_progress_s = num_tokens, now
        return now - self._last_progress_s

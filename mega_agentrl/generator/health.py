"""Engine health: token progress over time, and the cause of a failed start.

An engine may answer every question and still be of no use because its scheduler or a kernel hangs.
`TokenProgress` observes the number of tokens the engine has sampled in its lifetime, which must
grow while requests run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from mega_agentrl.types.errors import EngineLostError

STUCK_TIMEOUT_S = 20.0
"""Seconds without a token while requests run, including a long prefill."""


class TokenProgress:
    """Detects that one engine makes no progress; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_tokens = -1
        self._last_progress_s = clock()

    def stuck_s(self, num_tokens: int, num_running: int) -> float | None:
        """Return the seconds without progress if they exceed the timeout, else None."""
        now = self._clock()
        if num_tokens != self._num_tokens or not num_running:
            self._num_tokens, self._last_progress_s = num_tokens, now
            return None
        quiet_s = now - self._last_progress_s
        return quiet_s if quiet_s > STUCK_TIMEOUT_S else None


def to_start_error(name: str, error: RuntimeError) -> RuntimeError:
    """Return the error to raise for vLLM's error at a start.

    This is an `EngineLostError` if a signal may have ended its core, so that another start may
    succeed. vLLM reports that only in its text: an exit code below 0, or none, as it looks before
    there is one.
    """
    killed = re.search(r"core proc\(s\): ({}|.*: -\d)", str(error))
    error_class = EngineLostError if killed else RuntimeError
    return error_class(f"{name} did not start; its log file has the reason: {error}")

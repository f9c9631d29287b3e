"""Measure how long other processes have been silent, leaving out pauses of the watcher itself.

A watcher that was stopped or busy reads the heartbeats of that time late, so that time must not
count as silence of the others. A watching loop therefore calls `LivenessTracker.begin_round` in
each round, and a round longer than `MAX_ROUND_S` does not count.

The ranks' heartbeats, the health checks of engines and sandbox hosts, and the barrier of a save
use this rule.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


MAX_ROUND_S = 5.0
"""Longest round of a watching loop in seconds; a longer one was a pause of the watcher."""


class LivenessTracker[NameT: (int, str)]:
    """Measures how long each process has been silent; not thread-safe."""

    def __init__(
        self, max_round_s: float = MAX_ROUND_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a tracker without any process.

        Args:
            max_round_s: seconds above which a round does not count; infinite to count every round.
            clock: returns the time in seconds.
        """
        self._max_round_s = max_round_s
        self._clock = clock
        self._round_started_s = clock()
        self._watched_s = 0.0  # all rounds that count
        self._heard_at_s: dict[NameT, float] = {}  # on the scale of `_watched_s`

    def begin_round(self) -> None:
        """Begin a round of the watching loop; count the previous round unless it was too long."""
        now = self._clock()
        round_s = now - self._round_started_s
        self._round_started_s = now
        if round_s <= self._max_round_s:
            self._watched_s += round_s

    def record_heartbeat(self, name: NameT) -> None:
        """Record a heartbeat in this round; the first one starts the measurement."""
        self._heard_at_s[name] = self._watched_s

    def seconds_since_heartbeat(self, name: NameT) -> float:
        """Return the seconds of silence up to this round; 0 before the first heartbeat."""
        return self._watched_s - self._heard_at_s.get(name, self._watched_s)

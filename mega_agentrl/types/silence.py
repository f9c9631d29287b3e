"""Measure how long other processes have been silent, leaving out pauses of the watcher itself.

A watcher that was stopped or busy sees the signs of life of that time late, so the silence of
others proves nothing then. A watching loop therefore counts time in rounds: it calls
`SilenceTracker.begin_round` in each, and a round longer than `MAX_ROUND_S` does not count.

The ranks' heartbeats, the health checks of engines and sandbox hosts, and the barrier of a save
all use this rule. How they get signs of life, and what they do about a silent process, differs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

NameT = TypeVar("NameT", int, str)

MAX_ROUND_S = 5.0
"""Seconds above which a round of a watching loop was a pause of the watcher."""


class SilenceTracker(Generic[NameT]):
    """Knows how long processes have been silent; has no lock of its own."""

    def __init__(
        self, max_round_s: float = MAX_ROUND_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a tracker that has heard nobody.

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
        """Begin a round of the watching loop; the one before counts unless it was too long."""
        now = self._clock()
        round_s = now - self._round_started_s
        self._round_started_s = now
        if round_s <= self._max_round_s:
            self._watched_s += round_s

    def record_sign_of_life(self, name: NameT) -> None:
        """Record that a process was heard in this round; the first time starts the watch."""
        self._heard_at_s[name] = self._watched_s

    def silence_s(self, name: NameT) -> float:
        """Return the seconds of silence up to this round; 0 for a process that was never heard."""
        return self._watched_s - self._heard_at_s.get(name, self._watched_s)

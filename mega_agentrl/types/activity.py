"""Track which operations this process is working on or waiting for.

Worker threads mark their operations with a context manager; marks nest::

    with track_activity("update"):
        with track_activity("passes", "tensor ranks 0, 1"):
            with track_activity("receive", "rank 2", overdue_after_s=WAIT_OVERDUE_S):
                ...

`runtime.heartbeat` reads the activities with `current_activities`, which may be called from any
thread and never blocks. It warns of an activity that is older than `overdue_after_s` and never
interrupts it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WAIT_OVERDUE_S = 20.0
"""Age in seconds after which an activity that only waits for a peer is overdue."""

WORK_OVERDUE_S = 300.0
"""Age in seconds after which a working activity is overdue: large updates take minutes."""


@dataclass(frozen=True, slots=True)
class Activity:
    """An operation under way."""

    operation: str
    peer: str
    """Process or rank that the operation waits for; empty if there is none."""
    started_at_s: float
    """Start time on `time.monotonic`."""
    overdue_after_s: float
    """Age in seconds from which the operation is overdue."""


_activities: dict[int, tuple[Activity, ...]] = {}
"""Activities by thread id; a thread changes only its own entry, so no lock is needed."""


@contextmanager
def track_activity(
    operation: str, peer: str = "", *, overdue_after_s: float = WORK_OVERDUE_S
) -> Iterator[None]:
    """Mark the body of the `with` statement as an activity of the calling thread.

    Args:
        operation: name of the operation.
        peer: process or rank that the operation waits for.
        overdue_after_s: age in seconds from which the operation is overdue.
    """
    thread = threading.get_ident()
    before = _activities.get(thread, ())
    _activities[thread] = (*before, Activity(operation, peer, time.monotonic(), overdue_after_s))
    try:
        yield
    finally:
        if before:
            _activities[thread] = before
        else:
            del _activities[thread]


def current_activities() -> tuple[Activity, ...]:
    """Return the activities of all threads in order of their start; empty when idle."""
    activities = itertools.chain.from_iterable(tuple(_activities.values()))
    return tuple(sorted(activities, key=lambda activity: activity.started_at_s))

"""What this process is doing now, with whom and since when; told by the threads that work.

    with doing("update"):                                     # operation
        with doing("passes", "tensor ranks 0, 1"):             # work with others
            with doing("receive", "rank 2", bound_s=WAIT_S):   # a part that only waits

Marks nest within a thread, the innermost one counts as the operation under way. Each says after
how long it is overdue, which is worth a warning and ends nothing. Reading is safe from any thread,
costs the workers nothing, and never waits. Knows nobody who reads (`runtime.heartbeat` does).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

WAIT_S = 20.0
"""Bound of a mark that only waits for a peer's part of the same work."""

WORK_S = 300.0
"""Bound of a mark that works as well: an update of a large model takes minutes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An operation under way. peer: whom it waits for, empty for nobody in particular.

    since_s: when it began, on `time.monotonic`. bound_s: its age from which it is overdue.
    """

    operation: str
    peer: str
    since_s: float
    bound_s: float


_marks: dict[int, tuple[Mark, ...]] = {}
"""By thread; each changes its own entry only, so no lock is needed."""


@contextmanager
def doing(operation: str, peer: str = "", *, bound_s: float = WORK_S) -> Iterator[None]:
    """The body is this operation of the calling thread."""
    thread = threading.get_ident()
    before = _marks.get(thread, ())
    _marks[thread] = (*before, Mark(operation, peer, time.monotonic(), bound_s))
    try:
        yield
    finally:
        if before:
            _marks[thread] = before
        else:
            del _marks[thread]


def under_way() -> tuple[Mark, ...]:
    """The marks from the outermost to the innermost; empty while there is nothing to do.

    With several threads at work: in the order in which they began.
    """
    marks = itertools.chain.from_iterable(tuple(_marks.values()))
    return tuple(sorted(marks, key=lambda mark: mark.since_s))

"""What this process is doing now, with whom and since when; told by the threads that work.

    with doing("update"):                            # operation
        with doing("receive", peer="policy rank 2"):  # a part of it that waits for somebody

Marks nest within a thread, the innermost one counts as the operation under way. Reading is safe
from any thread, costs the workers nothing, and never waits. Knows nobody who reads
(`runtime.heartbeat` does).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """An operation under way. peer: whom it waits for, empty for nobody in particular.

    since_s: when it began, on `time.monotonic`.
    """

    operation: str
    peer: str
    since_s: float


_marks: dict[int, tuple[Mark, ...]] = {}
"""By thread; each changes its own entry only, so no lock is needed."""


@contextmanager
def doing(operation: str, peer: str = "") -> Iterator[None]:
    """The body is this operation of the calling thread."""
    thread = threading.get_ident()
    before = _marks.get(thread, ())
    _marks[thread] = (*before, Mark(operation, peer, time.monotonic()))
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

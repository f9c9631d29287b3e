"""What this process is doing now, with whom and since when; told by the one thread that works.

    with doing("update"):                            # operation
        with doing("receive", peer="policy rank 2"):  # a part of it that waits for somebody

Marks nest, the innermost one counts as the operation under way. Reading is safe from any thread,
costs the worker nothing, and never waits. Knows nobody who reads (`runtime.heartbeat` does).
"""

from __future__ import annotations

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


_marks: tuple[Mark, ...] = ()


@contextmanager
def doing(operation: str, peer: str = "") -> Iterator[None]:
    """The body is this operation; for the thread that works only."""
    global _marks
    before = _marks
    _marks = (*before, Mark(operation, peer, time.monotonic()))
    try:
        yield
    finally:
        _marks = before


def under_way() -> tuple[Mark, ...]:
    """The marks from the outermost to the innermost; empty while there is nothing to do."""
    return _marks

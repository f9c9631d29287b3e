"""Threads for work that grows with a request: decoding, hashing and encoding it.

The event loop does such work itself as long as it is small, because a thread takes longer to wake
up than a short message takes to encode. Longer work is done in one of two threads, by its size, so
that no session's longest requests delay the usual ones of others.

A tokenizer is not thread-safe: it has a switch for special tokens, which each call sets. Each
thread therefore has a copy of its own.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

MAX_LOOP_BYTES = 1 << 14
"""Size of the work that the event loop does itself. A tokenizer encodes at least 1 MiB a second, so
that this holds the loop for about 15 ms, and a turn with its history is usually shorter."""

MAX_MEDIUM_BYTES = 1 << 18
"""Size from which work is done by the thread for the longest requests: 65,000 tokens of English."""

_copies = threading.local()
"""`by_id` of each thread that has copies: original and copy by the original's id."""


class WorkThreads:
    """Runs functions on the event loop or in threads, by the size of their work."""

    def __init__(self) -> None:
        self._medium = _make_thread("encode-medium")
        self._large = _make_thread("encode-large")

    async def run(self, num_bytes: int, function: Callable[[], ResultT]) -> ResultT:
        """Return what a function returns, whose work grows with `num_bytes`."""
        if num_bytes <= MAX_LOOP_BYTES:
            return function()
        thread = self._medium if num_bytes <= MAX_MEDIUM_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(thread, function)

    def close(self) -> None:
        """End the threads after what they are running."""
        for thread in (self._medium, self._large):
            thread.shutdown(wait=False, cancel_futures=True)


def thread_copy[ResultT](original: ResultT) -> ResultT:
    """Return the calling thread's copy of an object in a thread of this module, else the object."""
    by_id: dict[int, tuple[object, object]] | None = getattr(_copies, "by_id", None)
    if by_id is None:
        return original
    if id(original) not in by_id:
        by_id[id(original)] = original, copy.deepcopy(original)
    return cast("ResultT", by_id[id(original)][1])


def _make_thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_start_copies)


def _start_copies() -> None:
    _copies.by_id = {}

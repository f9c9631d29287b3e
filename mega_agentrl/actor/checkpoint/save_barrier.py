"""Synchronisation of the ranks that write one checkpoint, with failure detection.

The ranks communicate through a key-value store that rank 0 hosts, never through collectives,
which would hang if a rank dies. Keys, under a prefix of the save:

    beat/R    heartbeat counter of rank R, incremented every `heartbeat_interval_s`
    done/R    rank R has written its file
    message   announcement of rank 0 before the writing (the folder)
    failed    message of the first failure; every rank raises it
    finished  rank 0 has committed the checkpoint
    left/R    rank R has read `finished`; rank 0 waits for it, because the store ends with rank 0

A rank whose counter has not changed for `heartbeat_timeout_s` is considered dead: rank 0 watches
all ranks, the others watch rank 0. If the store cannot be reached, rank 0 is considered dead. Every
wait ends if a rank has failed or is dead.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from mega_agentrl.types.liveness import LivenessTracker

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

HEARTBEAT_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 15.0
_POLL_INTERVAL_S = 0.05
_CLOSE_TIMEOUT_S = 5.0


class SaveBarrier:
    """One rank's side of one save; sends heartbeats from its creation until `close`.

    `store` must have a prefix of its own for the save, and a connection that no blocking call of
    others holds up. `clock` returns seconds and measures how long a rank has been silent. Every
    waiting method raises `RuntimeError` with the failed rank in its message once a rank has failed
    or died.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        description: str,
        *,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._description = description
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._watched_ranks = [r for r in range(num_ranks) if r != rank] if rank == 0 else [0]
        # Long rounds count: after a pause of this rank the counters are read before the check.
        self._liveness = LivenessTracker[int](max_round_s=math.inf, clock=clock)
        self._last_beats: dict[int, bytes] = {}
        self._silent_ranks: list[int] = []
        self._is_committed = False
        self._error: str | None = None
        self._stop_event = threading.Event()
        self._watch_thread = threading.Thread(
            target=self._watch_loop, name="checkpoint-heartbeat", daemon=True
        )
        self._watch_thread.start()

    @property
    def error(self) -> str | None:
        """Why the save has failed, as far as this rank knows; None if it has not."""
        return self._error

    def announce(self, message: str) -> None:
        """Send a message to all other ranks (rank 0 only)."""
        self._call_store(lambda: self._store.set("message", message))

    def wait_announcement(self) -> str:
        """Wait for the message of rank 0 and return it."""
        self._wait_for_key("message")
        return self._call_store(lambda: self._store.get("message")).decode()

    def mark_done(self) -> None:
        """Report that this rank's file is written."""
        self._call_store(lambda: self._store.set(f"done/{self._rank}", "1"))

    def wait_all_done(self) -> None:
        """Wait until every other rank is done (rank 0 only)."""
        for rank in self._watched_ranks:
            self._wait_for_key(f"done/{rank}")

    def finish(self) -> None:
        """Report that the checkpoint is committed; wait until all live ranks know (rank 0 only)."""
        self._is_committed = True
        self._call_store(lambda: self._store.set("finished", "1"))
        for rank in self._watched_ranks:
            while rank not in self._silent_ranks and not self._has_key(f"left/{rank}"):
                time.sleep(_POLL_INTERVAL_S)

    def wait_finished(self) -> None:
        """Wait until rank 0 has committed the checkpoint."""
        self._wait_for_key("finished")
        self._call_store(lambda: self._store.set(f"left/{self._rank}", "1"))

    def fail(self, reason: str) -> None:
        """Make the save fail on every rank; the first reason is reported."""
        if self._error is None:
            self._error = f"{self._description}: rank {self._rank}: {reason}"
        try:
            self._store.compare_set("failed", "", self._error)
        except dist.DistError:
            return  # rank 0 and the store are gone, which the other ranks detect themselves

    def close(self) -> None:
        """Stop sending and watching heartbeats.

        Waits for the thread, at most `_CLOSE_TIMEOUT_S`: a thread inside a call of the store at
        interpreter exit aborts the process with SIGABRT.
        """
        self._stop_event.set()
        self._watch_thread.join(_CLOSE_TIMEOUT_S)

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose file is not written yet."""
        return [
            r
            for r in range(self._num_ranks)
            if not self._call_store(lambda r=r: self._has_key(f"done/{r}"))
        ]

    def _wait_for_key(self, key: str) -> None:
        while not self._call_store(lambda: self._has_key(key)):
            if self._error is not None:
                raise RuntimeError(self._error)
            time.sleep(_POLL_INTERVAL_S)

    def _has_key(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _call_store(self, call: Callable[[], ResultT]) -> ResultT:
        try:
            return call()
        except dist.DistError as error:
            if self._error is None:
                self._error = self._rank0_lost_message()
            raise RuntimeError(self._error) from error

    def _watch_loop(self) -> None:
        num_beats = 0
        while not self._stop_event.wait(self._heartbeat_interval_s if num_beats else 0.0):
            num_beats += 1
            try:
                self._store.set(f"beat/{self._rank}", str(num_beats))
                self._silent_ranks = self._find_silent_ranks()
                failure = self._store.get("failed") if self._has_key("failed") else b""
            except dist.DistError:
                if not self._stop_event.is_set() and self._error is None:
                    self._error = self._rank0_lost_message()
                return
            if failure and self._error is None:
                self._error = failure.decode()
            if self._silent_ranks and self._error is None and not self._is_committed:
                self.fail(
                    f"rank {self._silent_ranks[0]} has sent no heartbeat for "
                    f"{self._heartbeat_timeout_s:g} s; probable cause: its process was killed or "
                    "its host is gone"
                )

    def _find_silent_ranks(self) -> list[int]:
        """Return the watched ranks without a recent heartbeat."""
        self._liveness.begin_round()
        for rank in self._watched_ranks:
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._has_key(key) else b""
            # True at the first read, too, from which on silence is measured.
            if beat != self._last_beats.get(rank):
                self._last_beats[rank] = beat
                self._liveness.record_heartbeat(rank)
        return [
            r
            for r in self._watched_ranks
            if self._liveness.seconds_since_heartbeat(r) > self._heartbeat_timeout_s
        ]

    def _rank0_lost_message(self) -> str:
        return (
            f"{self._description}: rank {self._rank}: the store of rank 0 cannot be reached; "
            "probable cause: the process of rank 0 was killed"
        )

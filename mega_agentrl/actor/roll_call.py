"""Ranks that write one checkpoint together: who is alive, who is done, whether one failed.

Everything goes through a key-value store that outlives no rank 0, never through collectives, so
that it can go on beside training. Keys, under a prefix of the save's own:

    beat/R    a number that rank R's watcher raises every `beat_s`
    done/R    rank R has written its share
    word      what rank 0 tells all before they write (the folder)
    failed    the message of the first failure; every rank raises it
    finished  rank 0 has closed the save
    left/R    rank R knows that; rank 0 stays until then, since the store goes when it does

A rank whose beat stands still for `silence_s` is taken for dead: rank 0 watches all, the others
watch rank 0. A rank that is slow, however long, still beats. A store that cannot be reached
means that rank 0 is gone. Nothing here waits without being unblocked by one of these.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

BEAT_S = 1.0
SILENCE_S = 15.0
_LOOK_S = 0.05
_CLOSE_S = 5.0


class RollCall:
    """One rank's side of one save; starts to beat at once, until `close`.

    Consumes: the other ranks' beats. Produces: this rank's. Raises `RuntimeError` from every
    waiting method once a rank has failed or died, with a message that says which.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        what: str,
        *,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """store: under the save's own prefix, not used by anyone who blocks on it.

        clock: seconds; how long a rank has been silent is measured on it.
        """
        self._store = store
        self._rank = rank
        self._what = what
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._watched = [r for r in range(num_ranks) if r != rank] if rank == 0 else [0]
        self._clock = clock
        self._heard = {r: (b"", clock()) for r in self._watched}
        self._silent: list[int] = []
        self._stands = False
        self._error: str | None = None
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="checkpoint-roll", daemon=True)
        self._watcher.start()

    @property
    def error(self) -> str | None:
        """Why this save has failed, as soon as it is known here."""
        return self._error

    def tell(self, word: str) -> None:
        """Rank 0: say the word that the others wait for."""
        self._ask(lambda: self._store.set("word", word))

    def hear(self) -> str:
        """Wait for rank 0's word."""
        self._wait("word")
        return self._ask(lambda: self._store.get("word")).decode()

    def done(self) -> None:
        """This rank's share is written."""
        self._ask(lambda: self._store.set(f"done/{self._rank}", "1"))

    def wait_all(self) -> None:
        """Rank 0: wait until every other rank is done."""
        for rank in self._watched:
            self._wait(f"done/{rank}")

    def finish(self) -> None:
        """Rank 0: release everyone; the save stands, also where a rank dies now."""
        self._stands = True
        self._ask(lambda: self._store.set("finished", "1"))
        for rank in self._watched:
            while rank not in self._silent and not self._has(f"left/{rank}"):
                time.sleep(_LOOK_S)

    def wait_finished(self) -> None:
        """Wait until rank 0 has finished."""
        self._wait("finished")
        self._ask(lambda: self._store.set(f"left/{self._rank}", "1"))

    def fail(self, reason: str) -> None:
        """Make the save fail on every rank; the first reason counts."""
        if self._error is None:
            self._error = f"{self._what}: rank {self._rank}: {reason}"
        try:
            self._store.compare_set("failed", "", self._error)
        except dist.DistError:
            return  # rank 0 is gone and takes the store along; the others see that themselves

    def close(self) -> None:
        """Stop beating and watching.

        The watcher is waited for: a thread that is inside the store when the interpreter ends
        takes the process down with SIGABRT. A store that hangs is left after `_CLOSE_S`.
        """
        self._over.set()
        self._watcher.join(_CLOSE_S)

    def missing(self) -> list[int]:
        """Rank 0: ranks that are not done yet."""
        return [r for r in self._watched if not self._ask(lambda r=r: self._has(f"done/{r}"))]

    def _wait(self, key: str) -> None:
        while not self._ask(lambda: self._has(key)):
            if self._error is not None:
                raise RuntimeError(self._error)
            time.sleep(_LOOK_S)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except dist.DistError as error:
            if self._error is None:
                self._error = self._leader_gone()
            raise RuntimeError(self._error) from error

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(self._beat_s if number else 0.0):
            number += 1
            try:
                self._store.set(f"beat/{self._rank}", str(number))
                self._silent = self._listen()
                failed = self._store.get("failed") if self._has("failed") else b""
            except dist.DistError:
                if not self._over.is_set() and self._error is None:
                    self._error = self._leader_gone()
                return
            if failed and self._error is None:
                self._error = failed.decode()
            if self._silent and self._error is None and not self._stands:
                self.fail(
                    f"rank {self._silent[0]} has not been heard of for {self._silence_s:g} s; "
                    "probable cause: its process was killed or its host is gone"
                )

    def _listen(self) -> list[int]:
        """Ranks that have been silent for too long."""
        now = self._clock()
        for rank in self._watched:
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._has(key) else b""
            if beat != self._heard[rank][0]:
                self._heard[rank] = (beat, now)
        return [r for r, (_, since) in self._heard.items() if now - since > self._silence_s]

    def _leader_gone(self) -> str:
        return (
            f"{self._what}: rank {self._rank}: the store of rank 0 cannot be reached; "
            "probable cause: the process of rank 0 was killed"
        )

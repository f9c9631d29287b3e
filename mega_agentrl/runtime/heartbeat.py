"""Who is alive and what they are at: ranks beat, the driver listens.

Each rank's side thread sends a datagram every `BEAT_S`: its name, the marks of `types.doing` and
their ages and bounds. A process that is stopped, or blocked in native code with the interpreter's
lock held, sends none. The driver's thread keeps the last words of each rank and when they came:

    silent for `SILENCE_S`       the rank is lost: `check` raises, naming it and what all were at
    a mark older than its bound  a line in `logs/driver.log`, see `Patience`

Datagrams cost next to nothing, need no connection and may get lost; words of other runs, and of a
rank's predecessor, do not carry the listener's token. Ends nobody: that is `rank_group`'s.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mega_agentrl.runtime.remote import DiedError
from mega_agentrl.types.doing import under_way

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

BEAT_S = 1.0
SILENCE_S = 15.0
"""A rank is lost after so long; the interpreter's lock is never held for so long by what works."""

_NAP_S = 4 * BEAT_S
"""A listener that did not run for so long cannot say that others were silent meanwhile."""

_MAX_BYTES = 4096
_logger = logging.getLogger(__name__)


class Said(NamedTuple):
    """A mark of `types.doing` as a beat tells it: with its age, as clocks differ."""

    operation: str
    peer: str
    age_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Station:
    """Where beats go. token: what they must carry."""

    host: str
    port: int
    token: str


class Heart:
    """One process's side: beats from its making until `stop`, whatever the process does."""

    def __init__(self, station: Station, name: str) -> None:
        self._station = station
        self._name = name
        self._over = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """No beat from here on."""
        self._over.set()

    def _beat(self) -> None:
        at = (self._station.host, self._station.port)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            while True:
                try:
                    way.sendto(self._words(), at)
                except OSError as error:  # the network is away: the next beat may get through
                    _logger.debug("beat of %s not sent: %s", self._name, error)
                if self._over.wait(BEAT_S):
                    return

    def _words(self) -> bytes:
        now = time.monotonic()
        marks = [
            Said(m.operation, m.peer, round(now - m.since_s, 1), m.bound_s) for m in under_way()
        ]
        words = {"token": self._station.token, "name": self._name, "marks": marks}
        return json.dumps(words).encode()


@dataclass(slots=True)
class _Heard:
    at_s: float
    marks: list[Said]


class Patience:
    """Which marks are overdue, each told once while it goes on.

    One that was told and ended all the same is told again only beyond twice that age: what is
    always slow soon goes unmentioned, what then hangs does not.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[str, str, str], float] = {}
        self._ended: dict[tuple[str, str, str], float] = {}

    def overdue(self, name: str, marks: Sequence[Said]) -> list[str]:
        """What is to be told of a rank by these words: operation, peer and seconds of each."""
        ages = {(name, mark.operation, mark.peer): mark.age_s for mark in marks}
        for key, age_s in list(self._told.items()):
            if key[0] == name and ages.get(key, 0.0) < age_s:
                self._ended[key] = self._told.pop(key)
        lines = []
        for at, mark in enumerate(marks):
            key = (name, mark.operation, mark.peer)
            is_told = key in self._told
            if is_told or mark.age_s > max(mark.bound_s, 2 * self._ended.get(key, 0.0)):
                self._told[key] = mark.age_s
            if key in self._told and not is_told:
                peer = next((inner.peer for inner in marks[at:] if inner.peer), "nobody else")
                lines.append(f"{mark.operation} with {peer} for {mark.age_s:.0f} s")
        return lines


class Listener:
    """The driver's side: listens from its making until `close`."""

    def __init__(self, host: str) -> None:
        """host: the driver's address as other nodes know it."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.settimeout(BEAT_S)
        self.station = Station(host, self._socket.getsockname()[1], secrets.token_hex(8))
        self._lock = threading.Lock()
        self._heard: dict[str, _Heard] = {}
        self._patience = Patience()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="heartbeats", daemon=True)
        self._thread.start()

    def check(self, names: Collection[str]) -> None:
        """Raise `DiedError` where one of these was heard of, and is not any more."""
        now = time.monotonic()
        with self._lock:
            silent = {
                name: now - self._heard[name].at_s
                for name in names
                if name in self._heard and now - self._heard[name].at_s > SILENCE_S
            }
        if silent:
            name = max(silent, key=lambda one: silent[one])
            raise DiedError(
                f"{name} has not been heard of for {silent[name]:.0f} s; probable cause: its "
                "process is stopped, blocked in native code, or its node is gone. Last words: "
                f"{self.described()}",
                name,
            )

    def described(self) -> str:
        """What everybody was at, by their last words."""
        now = time.monotonic()
        with self._lock:
            lines = [
                f"{name}: {_shown(heard.marks)} ({now - heard.at_s:.0f} s ago)"
                for name, heard in sorted(self._heard.items())
            ]
        return "; ".join(lines) or "none"

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        before_s = time.monotonic()
        while not self._over.is_set():
            try:
                data: bytes | None = self._socket.recv(_MAX_BYTES)
            except TimeoutError:
                data = None
            now = time.monotonic()
            if now - before_s > _NAP_S:  # it was this process that was stopped
                self._forgive(now - before_s)
            before_s = now
            if data is not None:
                self._note(data, now)

    def _forgive(self, nap_s: float) -> None:
        with self._lock:
            for heard in self._heard.values():
                heard.at_s += nap_s

    def _note(self, data: bytes, now: float) -> None:
        words = _read(data, self.station.token)
        if words is None:
            return
        name, marks = words
        with self._lock:
            self._heard[name] = _Heard(now, marks)
        for line in self._patience.overdue(name, marks):
            _logger.warning("overdue: %s: %s. It is at: %s", name, line, _shown(marks))


def _read(data: bytes, token: str) -> tuple[str, list[Said]] | None:
    """Who says that they are at what; None for anything that is no beat of this run."""
    try:
        words: Any = json.loads(data)
        if words["token"] != token:
            return None
        marks = [Said(str(a), str(b), float(c), float(d)) for a, b, c, d in words["marks"]]
        return str(words["name"]), marks
    except (ValueError, KeyError, TypeError):
        return None


def _shown(marks: list[Said]) -> str:
    if not marks:
        return "idle"
    return ", ".join(
        f"{mark.operation}{f' with {mark.peer}' if mark.peer else ''} for {mark.age_s:.0f} s"
        for mark in marks
    )

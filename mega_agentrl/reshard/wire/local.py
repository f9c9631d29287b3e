"""Frames between threads of one process: handed over by reference, nothing is copied.

    hub = LocalHub(world_size)
    wire = hub.end(rank)            one per thread

A frame lies in the sender's slot until the receiver has called `done`: only then does the
sender's `wait` return. A frame that is passed on stays where it is, too: who passes it on waits
for its own departures before it calls `done`.

Consumes: frames of peers. Waits for: a frame, or its `done`. Unblocked by: them, a `close` on
either side, or the deadline.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, eq=False)
class LocalDeparture:
    """One frame in the hub."""

    hub: LocalHub
    source: int
    target: int
    frame: torch.Tensor
    read: bool = False

    def wait(self, timeout_s: float) -> None:
        """See `Departure.wait`."""
        self.hub.wait_for(lambda: self.read, self.source, self.target, timeout_s)


@dataclass(slots=True, eq=False)
class LocalArrival:
    """number: it is the how-many-th frame from its source."""

    hub: LocalHub
    source: int
    target: int
    number: int

    def wait(self, timeout_s: float) -> torch.Tensor:
        """See `Arrival.wait`."""
        way, hub = (self.source, self.target), self.hub
        hub.wait_for(lambda: self.number in hub.sent[way], self.target, self.source, timeout_s)
        return hub.sent[way][self.number].frame

    def done(self) -> None:
        """See `Arrival.done`."""
        with self.hub.changed:
            self.hub.sent[self.source, self.target].pop(self.number).read = True
            self.hub.changed.notify_all()


class LocalWire:
    """One thread's end."""

    exact = False

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._num_sent: dict[int, int] = defaultdict(int)
        self._num_received: dict[int, int] = defaultdict(int)

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """See `Wire.slots`."""
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(count)]

    def send(self, frame: torch.Tensor, peer: int) -> LocalDeparture:
        """See `Wire.send`."""
        departure = LocalDeparture(self._hub, self._rank, peer, frame)
        with self._hub.changed:
            self._hub.sent[self._rank, peer][self._num_sent[peer]] = departure
            self._num_sent[peer] += 1
            self._hub.changed.notify_all()
        return departure

    def receive(self, slot: torch.Tensor, peer: int) -> LocalArrival:
        """See `Wire.receive`; the slot is not used."""
        arrival = LocalArrival(self._hub, peer, self._rank, self._num_received[peer])
        self._num_received[peer] += 1
        return arrival

    def close(self) -> None:
        """See `Wire.close`."""
        with self._hub.changed:
            self._hub.closed.add(self._rank)
            self._hub.changed.notify_all()


@dataclass(slots=True, eq=False)
class LocalHub:
    """Where the ends meet. sent: frames by number that are not read yet, by (source, target)."""

    world_size: int
    closed: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[tuple[int, int], dict[int, LocalDeparture]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def end(self, rank: int) -> LocalWire:
        """The wire of one rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"local wire: rank {rank}, expected less than {self.world_size}")
        return LocalWire(self, rank)

    def wait_for(self, is_true: Callable[[], bool], rank: int, peer: int, timeout_s: float) -> None:
        """Until something is true; raises `RuntimeError` at the deadline or a closed end.

        A frame of a peer that has closed is not valid any more: its memory may be in use again.
        """
        with self.changed:
            self.changed.wait_for(lambda: is_true() or {rank, peer} & self.closed, timeout_s)
            if gone := {rank, peer} & self.closed:
                raise RuntimeError(f"local wire: rank {min(gone)} has closed its end")
            if not is_true():
                raise RuntimeError(f"local wire: nothing from rank {peer} in {timeout_s:g} s")

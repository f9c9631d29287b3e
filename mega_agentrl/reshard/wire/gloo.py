"""Frames over TCP by gloo: any two ranks, host memory.

The n-th frame of a pair has tag n, so gloo itself keeps the order; a slot may be larger than
the frame that comes, never smaller (gloo would end the process).
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
)

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


_NEVER_SENT = 2**30
_AT_ONCE = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class GlooDeparture:
    """Holds the frame, which must live until it is sent."""

    work: Any
    frame: torch.Tensor

    def wait(self, timeout_s: float) -> None:
        """See `Departure.wait`."""
        self.work.wait(timedelta(seconds=timeout_s))


@dataclass(frozen=True, slots=True)
class GlooArrival:
    """Into a slot of the receiver's own."""

    work: Any
    slot: torch.Tensor

    def wait(self, timeout_s: float) -> torch.Tensor:
        """See `Arrival.wait`."""
        self.work.wait(timedelta(seconds=timeout_s))
        return self.slot

    def done(self) -> None:
        """Nothing to give back."""


class GlooWire:
    """A process group of its own; the default groups of both sides are not touched."""

    exact = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    @classmethod
    def join(cls, store: Store, rank: int, world_size: int, timeout_s: float) -> Self:
        """Meet all other ranks at a store; raises `RuntimeError` at the deadline."""
        group = ProcessGroupGloo(
            PrefixStore("gloo", store), rank, world_size, timeout=timedelta(seconds=timeout_s)
        )
        return cls(group)

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """See `Wire.slots`."""
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(count)]

    def send(self, frame: torch.Tensor, peer: int) -> GlooDeparture:
        """See `Wire.send`."""
        self._sent[peer] += 1
        return GlooDeparture(self._group.send([frame], peer, self._sent[peer]), frame)

    def receive(self, slot: torch.Tensor, peer: int) -> GlooArrival:
        """See `Wire.receive`."""
        self._received[peer] += 1
        return GlooArrival(self._group.recv([slot], peer, self._received[peer]), slot)

    def close(self) -> None:
        """See `Wire.close`.

        The only way to make gloo close a connection, and thus to wake a peer that waits, is to
        let a wait of our own time out.
        """
        group, self._group = self._group, None
        if group is None:
            return
        for peer in set(range(group.size())) - {group.rank()}:  # also who waits for a first frame
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(_AT_ONCE)

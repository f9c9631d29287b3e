"""In-process transport for tests: threads hand frames over by reference, without a copy.

    hub = InProcessHub(world_size)
    transport = hub.transport(rank)            one per thread

A frame stays in the sender's slot until the receiver has called `release`; only then does the
sender's `wait` return. All waits are ended by the frame or its release, by a `close` on either
side, or by the deadline.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True, eq=False)
class InProcessSendHandle:
    hub: InProcessHub
    source: int
    target: int
    frame: torch.Tensor
    is_read: bool = False

    def wait(self, timeout_s: float) -> None:
        self.hub.wait_for(lambda: self.is_read, self.source, self.target, timeout_s)


@dataclass(slots=True, eq=False)
class InProcessRecvHandle:
    hub: InProcessHub
    source: int
    target: int
    frame_index: int
    """Position among all frames from its source."""

    def wait(self, timeout_s: float) -> torch.Tensor:
        pair, frames = (self.source, self.target), self.hub.unread_frames
        self.hub.wait_for(lambda: self.frame_index in frames[pair], *pair[::-1], timeout_s)
        return frames[pair][self.frame_index].frame

    def release(self) -> None:
        with self.hub.condition:
            self.hub.unread_frames[self.source, self.target].pop(self.frame_index).is_read = True
            self.hub.condition.notify_all()


class InProcessTransport:
    """Transport of one thread."""

    needs_exact_size = False

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._num_sent, self._num_received = Counter[int](), Counter[int]()

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(count)]

    def send(self, frame: torch.Tensor, peer: int) -> InProcessSendHandle:
        handle = InProcessSendHandle(self._hub, self._rank, peer, frame)
        with self._hub.condition:
            self._hub.unread_frames[self._rank, peer][self._num_sent[peer]] = handle
            self._num_sent[peer] += 1
            self._hub.condition.notify_all()
        return handle

    def receive(self, slot: torch.Tensor, peer: int) -> InProcessRecvHandle:
        """Return a handle for the next frame; the slot is not used."""
        handle = InProcessRecvHandle(self._hub, peer, self._rank, self._num_received[peer])
        self._num_received[peer] += 1
        return handle

    def close(self) -> None:
        with self._hub.condition:
            self._hub.closed_ranks.add(self._rank)
            self._hub.condition.notify_all()


@dataclass(slots=True, eq=False)
class InProcessHub:
    """Shared state of the transports of all threads."""

    world_size: int
    closed_ranks: set[int] = field(default_factory=set)
    condition: threading.Condition = field(default_factory=threading.Condition)
    unread_frames: dict[tuple[int, int], dict[int, InProcessSendHandle]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By (source, target), the frames that have not been read, by index."""

    def transport(self, rank: int) -> InProcessTransport:
        assert 0 <= rank < self.world_size
        return InProcessTransport(self, rank)

    def wait_for(self, is_true: Callable[[], bool], rank: int, peer: int, timeout_s: float) -> None:
        """Wait for a condition; raises `RuntimeError` at the deadline or if an end is closed.

        A frame of a peer that has closed is no longer valid, because its memory may have been
        reused.
        """
        with self.condition:
            self.condition.wait_for(
                lambda: is_true() or {rank, peer} & self.closed_ranks, timeout_s
            )
            if closed := {rank, peer} & self.closed_ranks:
                raise RuntimeError(f"in-process transport: rank {min(closed)} has closed its end")
            if not is_true():
                raise RuntimeError(
                    f"in-process transport: nothing from rank {peer} in {timeout_s:g} s"
                )

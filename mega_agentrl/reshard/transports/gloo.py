"""Gloo transport: frames over TCP between any two ranks, in host memory.

The n-th frame of a pair has tag n, so gloo itself keeps the order. A slot may be larger than the
frame that arrives but never smaller, because gloo would then abort the process.
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


_UNUSED_TAG = 2**30
_CLOSE_TIMEOUT = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class GlooSendHandle:
    """Keeps the frame alive until it is sent."""

    work: Any
    frame: torch.Tensor

    def wait(self, timeout_s: float) -> None:  # noqa: D102
        self.work.wait(timedelta(seconds=timeout_s))


@dataclass(frozen=True, slots=True)
class GlooRecvHandle:
    """Frame that arrives in a slot of the receiver."""

    work: Any
    slot: torch.Tensor

    def wait(self, timeout_s: float) -> torch.Tensor:  # noqa: D102
        self.work.wait(timedelta(seconds=timeout_s))
        return self.slot

    def release(self) -> None:
        """Do nothing: the receiver owns the slot."""


class GlooTransport:
    """Transport over a gloo process group apart from the default groups of both sides."""

    needs_exact_size = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    @classmethod
    def join(cls, store: Store, rank: int, world_size: int, timeout_s: float) -> Self:
        """Meet all other ranks at a store; raises `RuntimeError` at the deadline."""
        group = ProcessGroupGloo(
            PrefixStore("gloo", store), rank, world_size, timeout=timedelta(seconds=timeout_s)
        )
        return cls(group)

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:  # noqa: D102
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(count)]

    def send(self, frame: torch.Tensor, peer: int) -> GlooSendHandle:  # noqa: D102
        self._num_sent[peer] += 1
        return GlooSendHandle(self._group.send([frame], peer, self._num_sent[peer]), frame)

    def receive(self, slot: torch.Tensor, peer: int) -> GlooRecvHandle:  # noqa: D102
        self._num_received[peer] += 1
        return GlooRecvHandle(self._group.recv([slot], peer, self._num_received[peer]), slot)

    def close(self) -> None:
        """Close all connections.

        The only way to make gloo close a connection, and so to wake a peer that waits, is to let a
        wait of our own time out.
        """
        group, self._group = self._group, None
        if group is None:
            return
        for peer in set(range(group.size())) - {group.rank()}:  # also who waits for a first frame
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG).wait(
                    _CLOSE_TIMEOUT
                )

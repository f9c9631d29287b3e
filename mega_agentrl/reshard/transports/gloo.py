"""Gloo transport: frames over TCP between any two ranks, in host memory.

The n-th frame of a pair has tag n, so gloo itself keeps the order. A slot may be larger than the
frame that arrives but never smaller, because gloo would then abort the process. Gloo listens on the
interface of `GLOO_SOCKET_IFNAME`, which every rank sets from its node's Ray address
(`runtime.gloo_interface`).

`HostStagedTransport` carries device memory over it, with a copy on each side. This slow path serves
a rank with a GPU whose peer has none or cannot be reached by NCCL.
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

    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport


_UNUSED_TAG = 2**30
_CLOSE_TIMEOUT = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class GlooSendHandle:
    """A frame that is being sent; keeps its memory alive."""

    work: Any
    frame: torch.Tensor

    def wait(self, timeout_s: float) -> None:  # noqa: D102
        self.work.wait(timedelta(seconds=timeout_s))


@dataclass(frozen=True, slots=True)
class GlooRecvHandle:
    """A frame that arrives in a slot of the receiver."""

    work: Any
    slot: torch.Tensor

    def wait(self, timeout_s: float) -> torch.Tensor:  # noqa: D102
        self.work.wait(timedelta(seconds=timeout_s))
        return self.slot

    def release(self) -> None:
        """Do nothing: the receiver owns the slot."""


class GlooTransport:
    """Transport of one rank over a gloo process group of its own."""

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

        The only way to make gloo close a connection, and so to wake a peer that waits, is to wait
        for a frame from that peer until a timeout.
        """
        group, self._group = self._group, None
        if group is None:
            return
        # All peers, because some may wait for their first frame.
        for peer in set(range(group.size())) - {group.rank()}:
            with suppress(RuntimeError):
                group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG).wait(
                    _CLOSE_TIMEOUT
                )


@dataclass(frozen=True, slots=True)
class HostStagedRecvHandle:
    """A frame that is copied to the device when it has arrived in host memory."""

    host_handle: RecvHandle
    slot: torch.Tensor
    """Device memory that the frame is copied to."""

    def wait(self, timeout_s: float) -> torch.Tensor:  # noqa: D102
        return self.slot.copy_(self.host_handle.wait(timeout_s))

    def release(self) -> None:  # noqa: D102
        self.host_handle.release()


class HostStagedTransport:
    """Transport of a rank with a GPU that sends copies of frames over a host transport."""

    needs_exact_size = False

    def __init__(self, host_transport: Transport) -> None:
        self._host_transport = host_transport

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """Return slots in the memory of the current device."""
        return [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def send(self, frame: torch.Tensor, peer: int) -> SendHandle:  # noqa: D102
        return self._host_transport.send(frame.to("cpu", copy=True), peer)

    def receive(self, slot: torch.Tensor, peer: int) -> HostStagedRecvHandle:  # noqa: D102
        return HostStagedRecvHandle(
            self._host_transport.receive(torch.empty_like(slot, device="cpu"), peer), slot
        )

    def close(self) -> None:  # noqa: D102
        self._host_transport.close()

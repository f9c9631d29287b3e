"""Gloo transport: frames over TCP between any two ranks, in host memory.

The n-th frame of a pair has tag n, so gloo itself keeps the order. A slot may be larger than the
frame that arrives but never smaller, because gloo would then abort the process. Gloo listens on the
interface of `GLOO_SOCKET_IFNAME`, which every rank sets from its node's Ray address
(`runtime.gloo_interface`).

A gloo group connects each rank with all others when it is created, which for 768 ranks makes
295,000 connections. The device of this one connects a pair at its first frame instead, and `join`
sends that frame to the given peers only.

`HostStagedTransport` carries device memory over it, with a copy on each side. This slow path serves
a rank with a GPU whose peer has none or cannot be reached by NCCL.
"""

from __future__ import annotations

import os
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
    from collections.abc import Iterable

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport


_CONNECT_TAG = 2**30
_UNUSED_TAG = _CONNECT_TAG + 1
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
    """Transport of one rank over a gloo process group of its own.

    Args:
        group: The process group.
        peers: Ranks that it is connected to.
    """

    needs_exact_size = False

    def __init__(self, group: Any, peers: Iterable[int]) -> None:
        self._group = group
        self._peers = sorted(peers)
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        peers: Iterable[int] | None = None,
    ) -> Self:
        """Connect to peers, which must connect to this rank, too.

        Args:
            store: Where the ranks meet.
            rank: Rank of this process.
            world_size: Number of ranks.
            timeout_s: Deadline of each wait.
            peers: Ranks to connect to; None for all others.

        Raises:
            RuntimeError: If a peer has not joined by the deadline.
        """
        if peers is None:
            peers = set(range(world_size)) - {rank}
        gloo: Any = ProcessGroupGloo  # whose stub lacks the options
        options = gloo._Options()
        options._devices, options._timeout = _make_devices(), timedelta(seconds=timeout_s)
        group = gloo(PrefixStore("gloo", store), rank, world_size, options)
        transport = cls(group, peers)
        transport._connect(timeout_s)
        return transport

    def _connect(self, timeout_s: float) -> None:
        """Exchange a byte with every peer, so that a peer that ends later is noticed at once."""
        byte = torch.zeros(1, dtype=torch.uint8)
        works = []
        for peer in self._peers:
            works.append(self._group.recv([torch.empty_like(byte)], peer, _CONNECT_TAG))
            works.append(self._group.send([byte], peer, _CONNECT_TAG))
        for work in works:
            work.wait(timedelta(seconds=timeout_s))

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
        for peer in self._peers:
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


def _make_devices() -> list[Any]:
    """Return devices that connect late, on the interfaces that gloo would choose."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if not names:
        return [ProcessGroupGloo.create_default_device(lazy_init=True)]
    return [
        ProcessGroupGloo.create_device(interface=name, lazy_init=True) for name in names.split(",")
    ]

"""NCCL transport: frames between GPUs over NVLink, PCIe or the network.

NCCL needs the same size on both sides: the slot given to `receive` must have exactly the size of
the frame (`needs_exact_size`). A frame of another size is never delivered, and the wait for it
ends at its deadline.

Each pair of ranks has a communicator and a stream per direction, so frames of one pair never wait
for frames of another pair or of the other direction. All communicators are created at the
start, in the same order on all ranks, by exchanging one byte. If they were created later, `receive`
would wait for its sender, and ranks could wait for each other in a cycle.

NCCL itself has neither deadlines nor a way to tell a peer that a rank leaves. Waits therefore poll,
and a `PeerMonitor` reports lost peers. Both cases abort the communicators, after which the
transport cannot be used. The creation of a communicator blocks inside the first operation, so that
it runs in a thread that is left behind at the deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.transports.base import RecvHandle, Transport


_NO_TIMEOUT_S = 10 * 365 * 86_400.0
_POLL_S = 0.0002
_CREATION_POLL_S = 0.05
_DISABLED_TIMEOUT = timedelta(days=365)
_ERROR_HANDLING_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class PeerMonitor:
    """Watches the connections to some peers.

    Nothing else may be received from these peers over the transport.
    """

    def __init__(self, transport: Transport, peers: Iterable[int]) -> None:
        self.lost_peers: set[int] = set()
        """Peers that have disconnected."""
        for peer in peers:
            handle = transport.receive(torch.empty(1, dtype=torch.uint8), peer)
            thread = threading.Thread(
                target=self._wait_for_disconnect,
                args=(handle, peer),
                name=f"peer-monitor-{peer}",
                daemon=True,
            )
            thread.start()

    def _wait_for_disconnect(self, handle: RecvHandle, peer: int) -> None:
        with suppress(RuntimeError):
            handle.wait(_NO_TIMEOUT_S)
        self.lost_peers.add(peer)


@dataclass(frozen=True, slots=True)
class NcclRecvHandle:
    """A frame in transit; keeps its memory alive."""

    transport: NcclTransport
    work: Any
    frame: torch.Tensor
    peer: int

    def wait(self, timeout_s: float) -> torch.Tensor:  # noqa: D102
        self.transport.wait_for_work(self.work, self.peer, timeout_s)
        return self.frame

    def release(self) -> None:
        """Do nothing: the receiver owns the slot."""


@dataclass(frozen=True, slots=True)
class NcclSendHandle:
    """A frame that is being sent."""

    handle: NcclRecvHandle

    def wait(self, timeout_s: float) -> None:  # noqa: D102
        self.handle.wait(timeout_s)


class NcclTransport:
    """Transport of one rank over NCCL.

    Args:
        ascending_group: Process group for frames from lower to higher ranks.
        descending_group: Process group for frames from higher to lower ranks.
        rank: Rank of this process.
        device: GPU of this process.
        peer_monitor: Reports peers that disconnect.
    """

    needs_exact_size = True

    def __init__(
        self,
        ascending_group: Any,
        descending_group: Any,
        rank: int,
        device: torch.device,
        peer_monitor: PeerMonitor,
    ) -> None:
        self._ascending_group, self._descending_group = ascending_group, descending_group
        self._rank, self._device, self._peer_monitor = rank, device, peer_monitor
        self._failure = ""

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        *,
        device: torch.device,
        hops: Iterable[tuple[int, int]],
        control: Transport,
    ) -> Self:
        """Connect to the peers of this rank.

        Args:
            store: Where the ranks meet.
            rank: Rank of this process.
            world_size: Number of ranks.
            timeout_s: Deadline for creating all communicators.
            device: GPU of this process.
            hops: (source, target) pairs that will exchange frames, of this rank at least.
            control: Transport over which these peers exchange nothing else.

        Raises:
            RuntimeError: At the deadline, or if a peer is gone; names operation and peer.
        """
        own_hops = sorted(hop for hop in set(hops) if rank in hop)
        peers = {source + target - rank for source, target in own_hops}
        ascending_group = _make_group(PrefixStore("nccl/up", store), rank, world_size)
        descending_group = _make_group(PrefixStore("nccl/down", store), rank, world_size)
        transport = cls(
            ascending_group, descending_group, rank, device, PeerMonitor(control, sorted(peers))
        )
        transport._create_communicators(own_hops, timeout_s)
        return transport

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:  # noqa: D102
        return [
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)
        ]

    def send(self, frame: torch.Tensor, peer: int) -> NcclSendHandle:  # noqa: D102
        self._check_open()
        work = self._group_for(self._rank, peer).send([frame], peer, 0)
        return NcclSendHandle(NcclRecvHandle(self, work, frame, peer))

    def receive(self, slot: torch.Tensor, peer: int) -> NcclRecvHandle:
        """Start receiving; the slot must have exactly the size of the frame."""
        self._check_open()
        work = self._group_for(peer, self._rank).recv([slot], peer, 0)
        return NcclRecvHandle(self, work, slot, peer)

    def wait_for_work(self, work: Any, peer: int, timeout_s: float) -> None:
        """Block until an operation is complete; aborts all communicators if it fails."""
        deadline_s = time.monotonic() + timeout_s
        self._check_open()
        while not work.is_completed():
            if peer in self._peer_monitor.lost_peers:
                self._abort(f"rank {peer} is gone")
            elif time.monotonic() > deadline_s:
                self._abort(f"an operation with rank {peer} did not end in {timeout_s:g} s")
            self._check_open()
            time.sleep(_POLL_S)
        try:
            # The operation is complete; with a timeout, wait raises its error.
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._abort(f"operation with rank {peer}: {error}")
            raise

    def close(self) -> None:
        """Abort the communicators.

        Peers notice once the owner of the control transport closes it.
        """
        if not self._failure:
            self._abort("this rank has closed its end")

    def _create_communicators(self, hops: list[tuple[int, int]], timeout_s: float) -> None:
        creation, begun = Future[None](), list[tuple[str, int]]()
        thread = threading.Thread(
            target=self._exchange_bytes,
            args=(hops, timeout_s, creation, begun),
            name="nccl-communicators",
            daemon=True,
        )
        thread.start()
        deadline_s = time.monotonic() + timeout_s
        while not wait([creation], _CREATION_POLL_S).done:
            action, peer = begun[-1] if begun else ("start", self._rank)
            what = f"creation of the communicator to {action} rank {peer}"
            if peer in self._peer_monitor.lost_peers:
                self._leave_thread(f"{what}: the rank is gone")
            elif time.monotonic() > deadline_s:
                self._leave_thread(
                    f"{what} did not end within the {timeout_s:g} s for {len(hops)} communicators"
                )
        creation.result()

    def _exchange_bytes(
        self,
        hops: list[tuple[int, int]],
        timeout_s: float,
        creation: Future[None],
        begun: list[tuple[str, int]],
    ) -> None:
        """Send or receive a byte for each hop, in order; record what was begun."""
        try:
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            for source, target in hops:
                if source == self._rank:
                    begun.append(("send to", target))
                    self.send(byte, target).wait(timeout_s)
                else:
                    begun.append(("receive from", source))
                    self.receive(byte, source).wait(timeout_s)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: handed to the caller
            creation.set_exception(error)
        else:
            creation.set_result(None)

    def _leave_thread(self, reason: str) -> None:
        """Raise; the thread ends when its operation does, which an abort may have to wait for."""
        self._failure = reason
        threading.Thread(target=self._abort, args=(reason,), daemon=True).start()
        self._check_open()

    def _group_for(self, source: int, target: int) -> Any:
        return self._ascending_group if source < target else self._descending_group

    def _check_open(self) -> None:
        """Raise after an abort, since an aborted operation looks like a completed one."""
        if self._failure:
            raise RuntimeError(f"NCCL transport: {self._failure}")

    def _abort(self, reason: str) -> None:
        self._failure = reason
        self._ascending_group.abort()
        self._descending_group.abort()


def _make_group(store: Store, rank: int, world_size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]  # GPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = _DISABLED_TIMEOUT  # wait_for_work has deadlines of its own
    with _async_error_handling_disabled():
        return ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _async_error_handling_disabled() -> Iterator[None]:
    """Keep torch from ending the process when a peer dies, which only this variable prevents."""
    previous_value = os.environ.get(_ERROR_HANDLING_VARIABLE)
    os.environ[_ERROR_HANDLING_VARIABLE] = "0"
    try:
        yield
    finally:
        if previous_value is None:
            del os.environ[_ERROR_HANDLING_VARIABLE]
        else:
            os.environ[_ERROR_HANDLING_VARIABLE] = previous_value

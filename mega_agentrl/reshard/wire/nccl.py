"""Frames between GPUs by NCCL: NVLink, PCIe or the network.

NCCL needs the same size on both sides: the slot given to `receive` must have exactly the size
of the frame that comes (`exact`). A frame of another size is never delivered; the wait for it
ends at its deadline.

Each pair of ranks has a communicator and a stream for each direction, so frames of one pair
never wait for those of another, nor for those that go the other way. They are all made at the
start, in the same order on all ranks, by a greeting: made later, they would make `receive` wait
for its sender, and ranks could wait for each other in a circle.

NCCL itself has neither deadlines nor a way to tell a peer that one leaves. So waits poll, and
`watch` says which peers are gone; both end in an abort of the communicators, after which the
wire is of no more use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mega_agentrl.reshard.wire.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.wire.ends import Wire

_POLL_S = 0.0002
_NEVER = timedelta(days=365)
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True, slots=True)
class NcclTransit:
    """A frame on its way, out or in; holds its memory."""

    wire: NcclWire
    work: Any
    frame: torch.Tensor
    peer: int

    def wait(self, timeout_s: float) -> torch.Tensor:
        """See `Departure.wait` and `Arrival.wait`."""
        self.wire.finish(self.work, self.peer, timeout_s)
        return self.frame

    def done(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True)
class NcclDeparture:
    """A frame on its way out."""

    transit: NcclTransit

    def wait(self, timeout_s: float) -> None:
        """See `Departure.wait`."""
        self.transit.wait(timeout_s)


class NcclWire:
    """One rank's end. up, down: groups for frames to ranks of greater and of lower number."""

    exact = True

    def __init__(self, up: Any, down: Any, rank: int, device: torch.device, watch: Watch) -> None:
        self._up, self._down = up, down
        self._rank, self._device, self._watch = rank, device, watch
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
        control: Wire,
    ) -> Self:
        """Meet the peers of some (source, target), the same on all ranks.

        control: over which these peers exchange nothing else. Raises `RuntimeError` at the
        deadline.
        """
        mine = sorted(hop for hop in set(hops) if rank in hop)
        peers = {source + target - rank for source, target in mine}
        up = _make_group(PrefixStore("nccl/up", store), rank, world_size)
        down = _make_group(PrefixStore("nccl/down", store), rank, world_size)
        wire = cls(up, down, rank, device, Watch(control, sorted(peers)))
        wire._greet(mine, timeout_s)
        return wire

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """See `Wire.slots`."""
        return [
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)
        ]

    def send(self, frame: torch.Tensor, peer: int) -> NcclDeparture:
        """See `Wire.send`."""
        self._check()
        work = self._group(self._rank, peer).send([frame], peer, 0)
        return NcclDeparture(NcclTransit(self, work, frame, peer))

    def receive(self, slot: torch.Tensor, peer: int) -> NcclTransit:
        """See `Wire.receive`; the slot has exactly the size of the frame."""
        self._check()
        work = self._group(peer, self._rank).recv([slot], peer, 0)
        return NcclTransit(self, work, slot, peer)

    def finish(self, work: Any, peer: int, timeout_s: float) -> None:
        """Until an operation is over; aborts everything where it does not end well."""
        deadline_s = time.monotonic() + timeout_s
        self._check()
        while not work.is_completed():
            if peer in self._watch.gone:
                self._fail(f"rank {peer} is gone")
            elif time.monotonic() > deadline_s:
                self._fail(f"no end of an operation with rank {peer} in {timeout_s:g} s")
            self._check()
            time.sleep(_POLL_S)
        try:
            # Over already; with a deadline it raises what the operation has ended with.
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self._fail(f"operation with rank {peer}: {error}")
            raise

    def close(self) -> None:
        """See `Wire.close`; peers notice it by the control wire, which is closed by its owner."""
        if not self._failure:
            self._fail("this rank has closed its end")

    def _greet(self, hops: list[tuple[int, int]], timeout_s: float) -> None:
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for source, target in hops:
            if source == self._rank:
                self.send(byte, target).wait(timeout_s)
            else:
                self.receive(byte, source).wait(timeout_s)

    def _group(self, source: int, target: int) -> Any:
        return self._up if source < target else self._down

    def _check(self) -> None:
        """An aborted operation looks like one that is over."""
        if self._failure:
            raise RuntimeError(f"nccl wire: {self._failure}")

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._up.abort()
        self._down.abort()


def _make_group(store: Store, rank: int, world_size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]  # GPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # deadlines are ours
    with _errors_left_to_us():
        return ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Else torch ends the process when a peer dies, and there is no option but a variable."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before

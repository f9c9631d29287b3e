"""Frames in device memory over a wire that knows only host memory: a copy on each side.

The slow way, for a rank with a GPU whose peer has none, or no NCCL to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mega_agentrl.reshard.wire.ends import Arrival, Departure, Wire


@dataclass(frozen=True, slots=True)
class StagedArrival:
    """slot: where the frame goes from host memory."""

    arrival: Arrival
    slot: torch.Tensor

    def wait(self, timeout_s: float) -> torch.Tensor:
        """See `Arrival.wait`."""
        return self.slot.copy_(self.arrival.wait(timeout_s))

    def done(self) -> None:
        """See `Arrival.done`."""
        self.arrival.done()


class StagedWire:
    """One rank's end."""

    exact = False

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """See `Wire.slots`; on the current device."""
        return [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(count)]

    def send(self, frame: torch.Tensor, peer: int) -> Departure:
        """See `Wire.send`."""
        return self._wire.send(frame.to("cpu", copy=True), peer)

    def receive(self, slot: torch.Tensor, peer: int) -> StagedArrival:
        """See `Wire.receive`."""
        return StagedArrival(self._wire.receive(torch.empty_like(slot, device="cpu"), peer), slot)

    def close(self) -> None:
        """See `Wire.close`."""
        self._wire.close()

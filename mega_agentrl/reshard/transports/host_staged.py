"""Host-staged transport: device memory over a transport for host memory, with a copy on each side.

This slow path serves a rank with a GPU whose peer has none or cannot be reached by NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport


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
    """Transport of one rank over the given host transport."""

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

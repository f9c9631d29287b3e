"""The interface of all transports: frames of bytes between two ranks, in order.

A frame is a flat uint8 tensor in a slot, a buffer of fixed size that the transport has allocated.
The n-th frame that rank a sends to rank b is the n-th that b receives from a, so a frame that is
lost or sent twice shows in the header of the next one.

    slots = transport.allocate_slots(2, num_bytes)
    sent = transport.send(slots[0][:n], peer)         received = transport.receive(slots[0], peer)
    sent.wait(timeout_s)                              frame = received.wait(timeout_s)
                                                      ... frame ...
                                                      received.release()

`send` and `receive` return at once. A slot may hold several frames to send. It may be written again
after `wait` of all send handles from it. All waits raise `RuntimeError` if the peer is gone or the
deadline has passed.

    transport      slots in        a frame              the slot of `receive`
    shared_memory  shared memory   stays with the sender and is read there; used for forwarding
    gloo           the host        is copied            at least as large as the frame
    nccl           the GPU         is copied            as large as the frame: `needs_exact_size`
    host_staged    the GPU         is copied through host memory by another transport

`registry` chooses one of them for each peer and lists the steps for adding another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class SendHandle(Protocol):
    """A frame that is being sent."""

    def wait(self, timeout_s: float) -> None:
        """Block until the peer has the frame or a copy of it is on the way."""


class RecvHandle(Protocol):
    """A frame that is being received."""

    def wait(self, timeout_s: float) -> torch.Tensor:
        """Return the frame once it has arrived; bytes after its end are undefined."""

    def release(self) -> None:
        """Declare that the frame has been read, so that its memory may be reused."""


class Transport(Protocol):
    """One rank's connections to all other ranks."""

    needs_exact_size: bool
    """Whether `receive` needs a slot of exactly the size of the frame."""

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """Return `count` buffers `[num_bytes]` uint8 to send from and receive into; called once."""

    def send(self, frame: torch.Tensor, peer: int) -> SendHandle:
        """Start sending `frame`, which lies in a slot."""

    def receive(self, slot: torch.Tensor, peer: int) -> RecvHandle:
        """Start receiving the next frame of a peer, which must fit into the slot."""

    def close(self) -> None:
        """Disconnect, so that peers that still wait fail. May be called twice."""

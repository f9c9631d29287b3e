"""The interface of all wires: frames of bytes between two ranks, in order.

A frame is flat uint8 in a slot, a buffer of fixed size that the wire has made. The n-th frame
that rank a sends to rank b is the n-th that b receives from a, whatever is in it: a frame that
is lost or sent twice therefore shows in the header of the next. A wire moves bytes and knows
neither plans nor weights.

    slots = wire.slots(2, num_bytes)
    departure = wire.send(slots[0][:n], peer)      arrival = wire.receive(slots[0], peer)
    departure.wait(timeout_s)                      frame = arrival.wait(timeout_s)
                                                   ... frame ...
                                                   arrival.done()

`send` and `receive` return at once. A slot may be written again after `wait` of all departures
from it. All waits raise `RuntimeError` where the peer is gone or the time is up.

    wire      slots in        a frame              the slot of `receive`
    local     the process     stays with the sender, is read there; unused
    mapped    shared memory   stays with the sender, is read there; used to pass the frame on
    gloo      the host        is copied            at least as large as the frame
    nccl      the GPU         is copied            as large as the frame: `exact`
    staged    the GPU         is copied by way of the host, over another wire
    routed    what all of a rank's wires can use; picks one of the others for each peer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Departure(Protocol):
    """A frame on its way out."""

    def wait(self, timeout_s: float) -> None:
        """Until the peer has it, or has a copy on the way."""


class Arrival(Protocol):
    """A frame on its way in."""

    def wait(self, timeout_s: float) -> torch.Tensor:
        """The frame; bytes after its end are undefined."""

    def done(self) -> None:
        """The frame has been read; the memory may be used again."""


class Wire(Protocol):
    """One rank's ends to all others. exact: `receive` needs slots cut to the frame's size."""

    exact: bool

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """[num_bytes] uint8 each, to send from and to receive into; called once."""

    def send(self, frame: torch.Tensor, peer: int) -> Departure:
        """Start sending. frame: the beginning of a slot."""

    def receive(self, slot: torch.Tensor, peer: int) -> Arrival:
        """Start receiving the next frame of a peer, of at most the size of the slot."""

    def close(self) -> None:
        """Leave; peers that still wait fail. Safe to call twice."""

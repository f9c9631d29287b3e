"""Frames that stay where they are: the receiver reads them in the sender's memory.

    sender                                       receiver
    writes a slot, `send`  -- frame n lies at -> maps that memory once, reads it there
    `wait` returns         <- frame n is read -- `done`

Who may write a slot when: its owner, from the `done` of all peers it has sent the slot's frame
to (each acknowledges its own frame number) until it sends the next. A receiver never writes a
peer's memory.

A frame that is passed on is first copied into the slot that was given to its `receive`: that
one is free as long as the arrival is not done. A frame from anywhere else is copied into memory
of its own, which lives until it is read.

The messages travel over gloo (`mailbox`), so order, deadlines and dead peers are as there.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mega_agentrl.reshard.wire.gloo import GlooWire
from mega_agentrl.reshard.wire.mailbox import Kind, Mailbox, Message

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.wire.ends import Wire
    from mega_agentrl.reshard.wire.memory import Block, Memory

_ALIGN = 4096
_SLOTS = 0
"""Number of the block in which the slots are."""


@dataclass(slots=True)
class _Lot:
    """A block and which peers can find it. number: 0 for the slots, else used for one frame."""

    number: int
    block: Block
    told: set[int] = field(default_factory=set)

    def offset_of(self, frame: torch.Tensor) -> int | None:
        """Where a frame begins in it; None for one that is elsewhere."""
        offset = frame.data_ptr() - self.block.whole.data_ptr()
        return offset if 0 <= offset <= self.block.whole.numel() - frame.numel() else None


@dataclass(frozen=True, slots=True)
class MappedDeparture:
    """Holds the memory of a frame that is in none of the slots."""

    mailbox: Mailbox
    peer: int
    number: int
    lot: _Lot

    def wait(self, timeout_s: float) -> None:
        """See `Departure.wait`: until the peer has read it."""
        self.mailbox.wait(Kind.done, self.number, self.peer, timeout_s)
        if self.lot.number != _SLOTS:
            self.lot.block.close()


@dataclass(slots=True)
class MappedArrival:
    """slot: of the receiver's own, for passing the frame on."""

    wire: MappedWire
    peer: int
    number: int
    slot: torch.Tensor
    frame: torch.Tensor | None = None
    copied: bool = False

    def wait(self, timeout_s: float) -> torch.Tensor:
        """See `Arrival.wait`: a view of the peer's memory, of exactly the frame's size."""
        self.frame = self.wire.open(self, timeout_s)
        return self.frame

    def copy(self, num_bytes: int) -> torch.Tensor:
        """The frame in the receiver's own memory."""
        assert self.frame is not None, "a frame is passed on after it has come"
        own = self.slot[:num_bytes]
        if not self.copied:
            own.copy_(self.frame[:num_bytes])
            self.copied = True
        return own

    def done(self) -> None:
        """See `Arrival.done`."""
        self.wire.acknowledge(self)


class MappedWire:
    """One rank's end. control: carries the messages, and nothing else between these ranks."""

    exact = False

    def __init__(self, control: Wire, memory: Memory, timeout_s: float) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self._mailbox = Mailbox(control)
        self._slots: _Lot | None = None
        self._num_lots = 0
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._open: dict[int, MappedArrival] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    @classmethod
    def join(
        cls, store: Store, rank: int, world_size: int, timeout_s: float, memory: Memory
    ) -> Self:
        """Meet all other ranks at a store; raises `RuntimeError` at the deadline."""
        control = GlooWire.join(PrefixStore("mapped", store), rank, world_size, timeout_s)
        return cls(control, memory, timeout_s)

    def slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:
        """See `Wire.slots`."""
        stride = -(-num_bytes // _ALIGN) * _ALIGN
        self._slots = _Lot(_SLOTS, self._memory.allocate(count * stride))
        whole = self._slots.block.whole
        return [whole[at : at + num_bytes] for at in range(0, count * stride, stride)]

    def send(self, frame: torch.Tensor, peer: int) -> MappedDeparture:
        """See `Wire.send`."""
        self._mailbox.expect(peer)
        lot, offset = self._place(frame)
        handle = b""
        if peer not in lot.told:
            handle = lot.block.handle()
            lot.told.add(peer)
        number = self._sent[peer]
        self._sent[peer] += 1
        self._memory.settle()
        message = Message(Kind.frame, number, lot.number, offset, frame.numel(), handle)
        self._mailbox.post(message, peer, self._timeout_s)
        return MappedDeparture(self._mailbox, peer, number, lot)

    def receive(self, slot: torch.Tensor, peer: int) -> MappedArrival:
        """See `Wire.receive`; the slot is written only if the frame is passed on."""
        self._mailbox.expect(peer)
        arrival = MappedArrival(self, peer, self._received[peer], slot)
        self._received[peer] += 1
        return arrival

    def open(self, arrival: MappedArrival, timeout_s: float) -> torch.Tensor:
        """Wait for a frame and find it in the peer's memory."""
        peer = arrival.peer
        message = self._mailbox.wait(Kind.frame, arrival.number, peer, timeout_s)
        if message.handle:
            self._mapped[peer, message.block] = self._memory.open(message.handle)
        whole = self._mapped[peer, message.block]
        if message.block != _SLOTS:
            del self._mapped[peer, message.block]  # lives as long as its one frame
        frame = whole[message.offset : message.offset + message.num_bytes]
        self._open[frame.data_ptr()] = arrival
        return frame

    def acknowledge(self, arrival: MappedArrival) -> None:
        """Tell the peer that its frame is read."""
        assert arrival.frame is not None, "only a frame that has come can be done with"
        self._memory.settle()
        self._open.pop(arrival.frame.data_ptr(), None)
        arrival.frame = None
        with suppress(RuntimeError):  # a peer that is gone needs no answer; the next wait tells
            message = Message(Kind.done, arrival.number)
            self._mailbox.post(message, arrival.peer, self._timeout_s)

    def close(self) -> None:
        """See `Wire.close`. Memory is unmapped when the last tensor on it is gone."""
        self._mailbox.close()
        self._mapped.clear()
        self._open.clear()
        if self._slots is not None:
            self._slots.block.close()

    def _place(self, frame: torch.Tensor) -> tuple[_Lot, int]:
        """Where peers find a frame; copies it where they could not."""
        arrival = self._open.get(frame.data_ptr())
        own = frame if arrival is None else arrival.copy(frame.numel())
        offset = None if self._slots is None else self._slots.offset_of(own)
        if self._slots is not None and offset is not None:
            return self._slots, offset
        self._num_lots += 1
        lot = _Lot(self._num_lots, self._memory.allocate(frame.numel()))
        lot.block.whole.copy_(own)
        return lot, 0

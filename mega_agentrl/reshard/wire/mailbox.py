"""Small messages between ranks, over gloo: what the wires of shared memory tell each other.

A message has a kind and a number and is asked for by both, so frames and acknowledgements of
two ranks that send to each other do not get into each other's way. Receptions are posted ahead:
a peer's messages come in while this rank does something else.

Consumes: messages. Waits for: one of them. Unblocked by: it, the peer's end, or the deadline.
One thread at a time.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mega_agentrl.reshard.wire.ends import Arrival, Departure, Wire

_MESSAGE_BYTES = 4096
_HEAD = struct.Struct("<6q")
_NUM_AHEAD = 8
_FLUSH_S = 1.0


class Kind(IntEnum):
    """frame: one is there to be read. done: it has been read."""

    frame = 0
    done = 1


@dataclass(frozen=True, slots=True)
class Message:
    """number: of the frame among all between its two ranks, in its direction. block, offset,
    num_bytes: where it lies. handle: of the block, where the peer does not have it yet.
    """

    kind: Kind
    number: int
    block: int = 0
    offset: int = 0
    num_bytes: int = 0
    handle: bytes = b""

    def packed(self) -> torch.Tensor:
        """[_MESSAGE_BYTES] uint8."""
        fields = (self.kind, self.number, self.block, self.offset, self.num_bytes)
        packed = _HEAD.pack(*fields, len(self.handle)) + self.handle
        if len(packed) > _MESSAGE_BYTES:
            raise RuntimeError(
                f"a memory handle of {len(self.handle)} bytes, expected at most "
                f"{_MESSAGE_BYTES - _HEAD.size}: expandable segments of many parts?"
            )
        return torch.frombuffer(bytearray(packed.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> Message:
        """Undo `packed`."""
        content = packed.numpy().tobytes()
        kind, number, block, offset, num_bytes, length = _HEAD.unpack_from(content)
        handle = content[_HEAD.size : _HEAD.size + length]
        return cls(Kind(kind), number, block, offset, num_bytes, handle)


class Mailbox:
    """One rank's."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._closed = False
        self._read: dict[tuple[int, Kind, int], Message] = {}
        self._posted: dict[int, deque[Arrival]] = defaultdict(deque)
        self._leaving: dict[int, deque[Departure]] = defaultdict(deque)

    def post(self, message: Message, peer: int, timeout_s: float) -> None:
        """Send a message. What was sent long ago has arrived, else `RuntimeError`."""
        self._check()
        leaving = self._leaving[peer]
        leaving.append(self._wire.send(message.packed(), peer))
        if len(leaving) > _NUM_AHEAD:
            leaving.popleft().wait(timeout_s)

    def expect(self, peer: int) -> None:
        """There will be messages from a peer."""
        self._check()
        posted = self._posted[peer]
        while len(posted) < _NUM_AHEAD:
            slot = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
            posted.append(self._wire.receive(slot, peer))

    def wait(self, kind: Kind, number: int, peer: int, timeout_s: float) -> Message:
        """One message; raises `RuntimeError` at the deadline or where the peer is gone."""
        deadline_s = time.monotonic() + timeout_s
        while (peer, kind, number) not in self._read:
            self.expect(peer)
            arrival = self._posted[peer].popleft()
            try:
                packed = arrival.wait(max(deadline_s - time.monotonic(), 0.001))
            except RuntimeError as error:
                raise RuntimeError(f"no word from rank {peer}: {error}") from error
            message = Message.unpacked(packed)
            self._read[peer, message.kind, message.number] = message
        return self._read.pop((peer, kind, number))

    def close(self) -> None:
        """Let go what is on its way, for a moment: peers that live take it at once."""
        deadline_s = time.monotonic() + _FLUSH_S
        for leaving in self._leaving.values():
            with suppress(RuntimeError):
                while leaving:
                    leaving.popleft().wait(max(deadline_s - time.monotonic(), 0.001))
        self._leaving.clear()
        self._wire.close()
        self._posted.clear()
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("this rank has closed its end")

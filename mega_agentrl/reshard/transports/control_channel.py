"""Control messages of the shared-memory transport, sent over gloo.

A message has a type and a frame index and is received by both, so that frames and releases of two
ranks that send to each other do not interfere. Receives are posted ahead: a peer's messages arrive
while this rank does something else.

Consumes: messages. Waits for: one of them. Unblocked by: its arrival, a peer that disconnects, or
the deadline. Not thread-safe.
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
    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport

_MESSAGE_BYTES = 4096
_HEADER = struct.Struct("<6q")
_NUM_POSTED_RECEIVES = 8
_FLUSH_TIMEOUT_S = 1.0


class MessageType(IntEnum):
    """Event that a message reports about a frame."""

    frame_ready = 0
    """The frame can be read."""
    frame_released = 1
    """The frame has been read."""


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A message about one frame."""

    message_type: MessageType
    frame_index: int
    """Position among all frames between the two ranks, in their direction."""
    block_id: int = 0
    """Block of shared memory that holds the frame."""
    offset: int = 0
    """First byte of the frame in the block."""
    num_bytes: int = 0
    """Size of the frame."""
    handle: bytes = b""
    """Handle of the block if the peer has not mapped it yet, else empty."""

    def pack(self) -> torch.Tensor:
        """Return the message as `[_MESSAGE_BYTES]` uint8."""
        fields = (self.message_type, self.frame_index, self.block_id, self.offset, self.num_bytes)
        packed = _HEADER.pack(*fields, len(self.handle)) + self.handle
        if len(packed) > _MESSAGE_BYTES:
            raise RuntimeError(
                f"a memory handle of {len(self.handle)} bytes, expected at most "
                f"{_MESSAGE_BYTES - _HEADER.size}; probable cause: an expandable segment of "
                "torch's allocator with many parts"
            )
        return torch.frombuffer(bytearray(packed.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> ControlMessage:
        """Invert `pack`."""
        content = packed.numpy().tobytes()
        message_type, frame_index, block_id, offset, num_bytes, length = _HEADER.unpack_from(
            content
        )
        handle = content[_HEADER.size : _HEADER.size + length]
        return cls(MessageType(message_type), frame_index, block_id, offset, num_bytes, handle)


class ControlChannel:
    """Control messages of one rank."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._closed = False
        self._received: dict[tuple[int, MessageType, int], ControlMessage] = {}
        self._pending_receives: dict[int, deque[RecvHandle]] = defaultdict(deque)
        self._pending_sends: dict[int, deque[SendHandle]] = defaultdict(deque)

    def send(self, message: ControlMessage, peer: int, timeout_s: float) -> None:
        """Send a message; raises `RuntimeError` if an earlier message has not arrived in time."""
        self._check_open()
        pending = self._pending_sends[peer]
        pending.append(self._transport.send(message.pack(), peer))
        if len(pending) > _NUM_POSTED_RECEIVES:
            pending.popleft().wait(timeout_s)

    def post_receives(self, peer: int) -> None:
        """Prepare to receive messages from a peer."""
        self._check_open()
        pending = self._pending_receives[peer]
        while len(pending) < _NUM_POSTED_RECEIVES:
            slot = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
            pending.append(self._transport.receive(slot, peer))

    def receive(
        self, message_type: MessageType, frame_index: int, peer: int, timeout_s: float
    ) -> ControlMessage:
        """Return one message; raises `RuntimeError` at the deadline or if the peer is gone."""
        deadline_s = time.monotonic() + timeout_s
        while (peer, message_type, frame_index) not in self._received:
            self.post_receives(peer)
            handle = self._pending_receives[peer].popleft()
            try:
                packed = handle.wait(max(deadline_s - time.monotonic(), 0.001))
            except RuntimeError as error:
                raise RuntimeError(f"no message from rank {peer}: {error}") from error
            message = ControlMessage.unpack(packed)
            self._received[peer, message.message_type, message.frame_index] = message
        return self._received.pop((peer, message_type, frame_index))

    def close(self) -> None:
        """Disconnect after a moment in which live peers can take the messages on their way."""
        deadline_s = time.monotonic() + _FLUSH_TIMEOUT_S
        for pending in self._pending_sends.values():
            with suppress(RuntimeError):
                while pending:
                    pending.popleft().wait(max(deadline_s - time.monotonic(), 0.001))
        self._pending_sends.clear()
        self._transport.close()
        self._pending_receives.clear()
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this rank has closed its end")

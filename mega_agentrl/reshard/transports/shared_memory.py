"""Shared-memory transport: the receiver reads a frame in the sender's memory.

    sender                                          receiver
    writes a slot, `send`  -- frame n is ready ->   maps that memory once, reads the frame there
    `wait` returns         <- frame n is released   `release`

The owner of a slot may write to it again when all peers to which it has sent the slot's frame have
released that frame. A receiver never writes to a peer's memory.

A forwarded frame is first copied into the slot that was given to its `receive`, which is free until
the handle is released. A frame outside the slots is copied into a block of its own, which lives
until it is read.

The control messages travel over gloo (`ControlChannel`), which also handles order, deadlines and
dead peers. A message is identified by its type and frame index, so that frames and releases of two
ranks that send to each other do not interfere. Receives are posted ahead: a peer's messages arrive
while this rank does something else.
"""

from __future__ import annotations

import struct
import time
from collections import Counter, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Self

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from mega_agentrl.reshard.layout import round_up
from mega_agentrl.reshard.transports.gloo import GlooTransport

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from mega_agentrl.reshard.transports.base import RecvHandle, SendHandle, Transport
    from mega_agentrl.reshard.transports.memory_handles import SharedBuffer, SharedMemory


_MESSAGE_BYTES = 4096
_HEADER = struct.Struct("<6q")
_NUM_POSTED_RECEIVES = 8
_FLUSH_TIMEOUT_S = 1.0
_SLOT_ALIGN_BYTES = 4096
_SLOTS_BLOCK_ID = 0
"""Id of the block that contains the slots."""


class MessageType(IntEnum):
    """Event that a control message reports."""

    frame_ready = 0
    """The frame can be read."""
    frame_released = 1
    """The frame has been read."""


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A control message about one frame."""

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
                f"{_MESSAGE_BYTES - _HEADER.size}"
            )
        return torch.frombuffer(bytearray(packed.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> ControlMessage:
        """Return the message that `pack` has packed."""
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
        """Disconnect, giving peers up to `_FLUSH_TIMEOUT_S` to receive pending messages."""
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


@dataclass(slots=True)
class _SharedAllocation:
    """A block of shared memory and the peers that have its handle."""

    block_id: int
    """`_SLOTS_BLOCK_ID` for the slots; any other block is used for one frame."""
    block: SharedBuffer
    known_peers: set[int] = field(default_factory=set)

    def offset_of(self, frame: torch.Tensor) -> int | None:
        """Return the offset of a frame in the block, or None if it is elsewhere."""
        offset = frame.data_ptr() - self.block.tensor.data_ptr()
        return offset if 0 <= offset <= self.block.tensor.numel() - frame.numel() else None


@dataclass(frozen=True, slots=True)
class SharedMemorySendHandle:
    """A sent frame; keeps the memory of a frame outside the slots alive."""

    channel: ControlChannel
    peer: int
    frame_index: int
    allocation: _SharedAllocation

    def wait(self, timeout_s: float) -> None:
        """Block until the peer has read the frame."""
        self.channel.receive(MessageType.frame_released, self.frame_index, self.peer, timeout_s)
        if self.allocation.block_id != _SLOTS_BLOCK_ID:
            self.allocation.block.close()


@dataclass(slots=True)
class SharedMemoryRecvHandle:
    """A frame in a peer's memory."""

    transport: SharedMemoryTransport
    peer: int
    frame_index: int
    slot: torch.Tensor
    """Slot of the receiver, for forwarding the frame."""
    frame: torch.Tensor | None = None
    is_copied: bool = False

    def wait(self, timeout_s: float) -> torch.Tensor:
        """Return a view of the peer's memory of exactly the size of the frame."""
        self.frame = self.transport.map_frame(self, timeout_s)
        return self.frame

    def copy_to_slot(self, num_bytes: int) -> torch.Tensor:
        """Return the frame in the receiver's own memory, copying it on the first call."""
        assert self.frame is not None, "a frame is forwarded after it has arrived"
        copied_frame = self.slot[:num_bytes]
        if not self.is_copied:
            copied_frame.copy_(self.frame[:num_bytes])
            self.is_copied = True
        return copied_frame

    def release(self) -> None:  # noqa: D102
        self.transport.release_frame(self)


class SharedMemoryTransport:
    """Transport of one rank over shared memory.

    Args:
        control: Transport for the messages, used for nothing else between these ranks.
        memory: Kind of memory that is shared.
        timeout_s: Deadline for control messages.
    """

    needs_exact_size = False

    def __init__(self, control: Transport, memory: SharedMemory, timeout_s: float) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        self._channel = ControlChannel(control)
        self._slot_allocation: _SharedAllocation | None = None
        self._num_allocations = 0
        self._mapped_blocks: dict[tuple[int, int], torch.Tensor] = {}
        self._open_frames: dict[int, SharedMemoryRecvHandle] = {}
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    @classmethod
    def join(
        cls, store: Store, rank: int, world_size: int, timeout_s: float, memory: SharedMemory
    ) -> Self:
        """Meet all other ranks at a store; raises `RuntimeError` at the deadline."""
        control = GlooTransport.join(
            PrefixStore("shared_memory", store), rank, world_size, timeout_s
        )
        return cls(control, memory, timeout_s)

    def allocate_slots(self, count: int, num_bytes: int) -> list[torch.Tensor]:  # noqa: D102
        stride = round_up(num_bytes, _SLOT_ALIGN_BYTES)
        self._slot_allocation = _SharedAllocation(
            _SLOTS_BLOCK_ID, self._memory.allocate(count * stride)
        )
        tensor = self._slot_allocation.block.tensor
        return [tensor[start : start + num_bytes] for start in range(0, count * stride, stride)]

    def send(self, frame: torch.Tensor, peer: int) -> SharedMemorySendHandle:  # noqa: D102
        self._channel.post_receives(peer)
        allocation, offset = self._share_frame(frame)
        block_handle = b""
        if peer not in allocation.known_peers:
            block_handle = allocation.block.handle()
            allocation.known_peers.add(peer)
        frame_index = self._num_sent[peer]
        self._num_sent[peer] += 1
        self._memory.synchronize()
        message = ControlMessage(
            MessageType.frame_ready,
            frame_index,
            allocation.block_id,
            offset,
            frame.numel(),
            block_handle,
        )
        self._channel.send(message, peer, self._timeout_s)
        return SharedMemorySendHandle(self._channel, peer, frame_index, allocation)

    def receive(self, slot: torch.Tensor, peer: int) -> SharedMemoryRecvHandle:
        """Return a handle for the next frame; the slot is written only for forwarding."""
        self._channel.post_receives(peer)
        handle = SharedMemoryRecvHandle(self, peer, self._num_received[peer], slot)
        self._num_received[peer] += 1
        return handle

    def map_frame(self, handle: SharedMemoryRecvHandle, timeout_s: float) -> torch.Tensor:
        """Wait for a frame and map it from the peer's memory."""
        peer = handle.peer
        message = self._channel.receive(
            MessageType.frame_ready, handle.frame_index, peer, timeout_s
        )
        if message.handle:
            self._mapped_blocks[peer, message.block_id] = self._memory.open(message.handle)
        tensor = self._mapped_blocks[peer, message.block_id]
        if message.block_id != _SLOTS_BLOCK_ID:
            # The block holds only this frame, whose tensor keeps the mapping alive.
            del self._mapped_blocks[peer, message.block_id]
        frame = tensor[message.offset : message.offset + message.num_bytes]
        self._open_frames[frame.data_ptr()] = handle
        return frame

    def release_frame(self, handle: SharedMemoryRecvHandle) -> None:
        """Tell the peer that its frame has been read."""
        assert handle.frame is not None, "only a frame that has arrived can be released"
        self._memory.synchronize()
        self._open_frames.pop(handle.frame.data_ptr(), None)
        handle.frame = None
        with suppress(RuntimeError):  # a peer that is gone needs no answer; the next wait raises
            message = ControlMessage(MessageType.frame_released, handle.frame_index)
            self._channel.send(message, handle.peer, self._timeout_s)

    def close(self) -> None:
        """Disconnect; memory is unmapped when the last tensor on it is gone."""
        self._channel.close()
        self._mapped_blocks.clear()
        self._open_frames.clear()
        if self._slot_allocation is not None:
            self._slot_allocation.block.close()

    def _share_frame(self, frame: torch.Tensor) -> tuple[_SharedAllocation, int]:
        """Return the allocation and offset of a frame, copying it if peers could not map it."""
        handle = self._open_frames.get(frame.data_ptr())
        local_frame = frame if handle is None else handle.copy_to_slot(frame.numel())
        if self._slot_allocation is not None:
            offset = self._slot_allocation.offset_of(local_frame)
            if offset is not None:
                return self._slot_allocation, offset
        self._num_allocations += 1
        allocation = _SharedAllocation(self._num_allocations, self._memory.allocate(frame.numel()))
        allocation.block.tensor.copy_(local_frame)
        return allocation, 0

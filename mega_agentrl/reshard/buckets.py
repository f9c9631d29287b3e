"""The byte layout of a message, written by the sender and checked by the receiver.

    header   4 int64   magic, weight version, message index, number of pieces
    pieces             each on a multiple of 16 bytes, row-major, in the wire dtype
    digests  n int64   one checksum per piece

Both sides compute all offsets from the plan; nothing but weights and checks is transmitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.reshard.digest import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mega_agentrl.reshard.plan import Message, Piece

MAGIC = 0x6D65676157
_HEADER_BYTES = 32
_ALIGN = 16


def buffer_bytes(message: Message) -> int:
    """Size of the message on the wire."""
    return _digests_at(message) + 8 * len(message.pieces)


def pack(
    message: Message,
    params: Mapping[str, torch.Tensor],
    dtype_of: Mapping[str, str],
    version: int,
) -> torch.Tensor:
    """The message as flat uint8 in host memory.

    params: shards of the source rank by parameter name. dtype_of: wire dtype by tensor name.
    """
    buffer = torch.zeros(buffer_bytes(message), dtype=torch.uint8)
    _header(buffer).copy_(_expected_header(message, version))
    digests = []
    for piece, data in _piece_views(message, buffer):
        block = piece.block
        dtype = getattr(torch, dtype_of[block.hf_name])
        data.view(dtype).view(block.hf_rect.shape).copy_(
            params[piece.param].detach()[block.local_rect.slices]
        )
        digests.append(digest(data))
    buffer[_digests_at(message) :].view(torch.int64).copy_(torch.tensor(digests))
    return buffer


def unpack(
    message: Message, buffer: torch.Tensor, dtype_of: Mapping[str, str], version: int
) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Every piece with its values, as a view of the buffer, shaped like its rectangle.

    Raises `ValueError` naming version, tensor, source rank and message where something is off.
    """
    got, expected = _header(buffer).tolist(), _expected_header(message, version).tolist()
    if got != expected:
        raise ValueError(
            f"message {message.index} from trainer rank {message.source}: header says [magic, "
            f"version, message, pieces] {got}, expected {expected}; probable cause: trainer "
            "and engine are at different updates or hold different plans"
        )
    digests = buffer[_digests_at(message) :].view(torch.int64).tolist()
    for (piece, data), sent in zip(_piece_views(message, buffer), digests, strict=True):
        block = piece.block
        if (received := digest(data)) != sent:
            raise ValueError(
                f"{block.hf_name} {block.hf_rect.start}..{block.hf_rect.stop}: digest "
                f"{received:x} of what arrived, {sent:x} of what trainer rank {message.source} "
                f"sent as {piece.param} in bucket {message.index}; probable cause: corrupted "
                "on the way"
            )
        dtype = getattr(torch, dtype_of[block.hf_name])
        yield piece, data.view(dtype).view(block.hf_rect.shape)


def _piece_views(message: Message, buffer: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    offset = _HEADER_BYTES
    for piece in message.pieces:
        yield piece, buffer[offset : offset + piece.num_bytes]
        offset = _aligned(offset + piece.num_bytes)


def _digests_at(message: Message) -> int:
    offset = _HEADER_BYTES
    for piece in message.pieces:
        offset = _aligned(offset + piece.num_bytes)
    return offset


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) // _ALIGN * _ALIGN


def _header(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[:_HEADER_BYTES].view(torch.int64)


def _expected_header(message: Message, version: int) -> torch.Tensor:
    return torch.tensor([MAGIC, version, message.index, len(message.pieces)])

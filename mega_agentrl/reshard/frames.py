"""A bucket as bytes: written by a trainer rank, read by a rollout rank, or passed on as it is.

    header   4 int64   magic, weight version, number of the bucket, bytes after the header
    pieces             in the bucket's order, each on a multiple of 16 bytes, row-major, in the
                       wire dtype of its tensor

Both sides compute all offsets from the plan. `END` in place of a bucket number closes an
update: a frame of nothing but a header.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.reshard.delivery import Places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mega_agentrl.reshard.delivery import Bucket, DeliveryPlan, Piece, Place
    from mega_agentrl.reshard.layout import ShardLayout

Copy = Callable[["Place", torch.Tensor, torch.Tensor], None]
"""Copies from a place of a parameter, third, to a frame, second; shapes as in `tally.Tally`."""

END = -1
HEADER_BYTES = 32
_MAGIC = 0x6D65676157
_ALIGN = 16


@dataclass(frozen=True, slots=True)
class Part:
    """A piece in the frame and in the shards of one rank."""

    piece: Piece
    span: slice
    dtype: torch.dtype
    places: tuple[Place, ...]

    def view(self, frame: torch.Tensor) -> torch.Tensor:
        """Its values in a frame, shaped like its rectangle; shares memory."""
        return frame[self.span].view(self.dtype).view(self.piece.rect.shape)


def frame_bytes(bucket: Bucket) -> int:
    """Size of the bucket's frame."""
    return HEADER_BYTES + sum(_aligned(piece.num_bytes) for piece in bucket.pieces)


class Frames:
    """Writes and reads the frames of one rank."""

    def __init__(self, plan: DeliveryPlan, layout: Iterable[ShardLayout]) -> None:
        self._dtype_of = {name: getattr(torch, dtype) for name, dtype in plan.dtype_of.items()}
        self._places = Places(layout)
        self._parts: dict[int, list[Part]] = {}

    def parts(self, bucket: Bucket) -> list[Part]:
        """Where every piece is; raises `ValueError` for one this rank has no place for."""
        if bucket.index not in self._parts:
            self._parts[bucket.index] = self._find(bucket)
        return self._parts[bucket.index]

    def _find(self, bucket: Bucket) -> list[Part]:
        offset = HEADER_BYTES
        parts = []
        for piece in bucket.pieces:
            span = slice(offset, offset + piece.num_bytes)
            places = tuple(self._places.find(piece))
            parts.append(Part(piece, span, self._dtype_of[piece.hf_name], places))
            offset += _aligned(piece.num_bytes)
        return parts

    def write(
        self,
        bucket: Bucket,
        slot: torch.Tensor,
        shards: Mapping[str, torch.Tensor],
        version: int,
        copy: Copy | None = None,
    ) -> torch.Tensor:
        """The frame in the beginning of a slot. shards: by parameter name, in any dtype."""
        frame = slot[: frame_bytes(bucket)]
        frame[:HEADER_BYTES].view(torch.int64).copy_(_header(version, bucket.index, len(frame)))
        for part in self.parts(bucket):
            place = part.places[0]
            values = shards[place.param].detach()[place.rect.slices]
            if copy is not None:
                copy(place, part.view(frame), values)
            else:
                part.view(frame).copy_(values.reshape(part.piece.rect.shape))
        return frame

    def read(self, bucket: Bucket, frame: torch.Tensor) -> Iterator[tuple[Place, torch.Tensor]]:
        """Every place that gets values, with them, shaped like the place's rectangle."""
        for part in self.parts(bucket):
            values = part.view(frame)
            for place in part.places:
                yield place, values.view(place.rect.shape)


def write_end(slot: torch.Tensor, version: int) -> torch.Tensor:
    """The frame that closes an update."""
    frame = slot[:HEADER_BYTES]
    frame.view(torch.int64).copy_(_header(version, END, HEADER_BYTES))
    return frame


def check_header(frame: torch.Tensor, version: int, bucket: Bucket | None) -> None:
    """Raise `ValueError` where a frame is not the one expected; bucket: None for the end."""
    index, size = (bucket.index, frame_bytes(bucket)) if bucket else (END, HEADER_BYTES)
    expected = _header(version, index, size).tolist()
    got = frame[:HEADER_BYTES].view(torch.int64).tolist()
    if got == expected:
        return
    if got[0] != _MAGIC:
        cause = "what came is no frame of ours"
    elif got[1] != version:
        cause = f"a frame of weight version {got[1]}"
    elif got[2] == index:
        cause = "the sender has this bucket in another size; were plans made from other layouts?"
    else:
        cause = f"a bucket was lost or sent twice: {_named(got[2])} came instead"
    raise ValueError(
        f"expected {_named(index)} of weight version {version} with {expected[3]} bytes, "
        f"header says [magic, version, bucket, bytes] {got}: {cause}"
    )


def _named(index: int) -> str:
    return "the end" if index == END else f"bucket {index}"


def _header(version: int, index: int, num_bytes: int) -> torch.Tensor:
    return torch.tensor([_MAGIC, version, index, num_bytes - HEADER_BYTES])


def _aligned(num_bytes: int) -> int:
    return (num_bytes + _ALIGN - 1) // _ALIGN * _ALIGN

"""Byte format of a bucket: packed by a trainer rank, unpacked by a rollout rank or forwarded as is.

    header   4 int64   magic, weight version, bucket index, number of bytes after the header
    slices             in the bucket's order, each aligned to 16 bytes, row-major, in the dtype in
                       which its tensor is sent

Both sides compute all offsets from the plan. A frame that is only a header, with `END_OF_UPDATE` in
place of the bucket index, closes an update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.reshard.layout import round_up
from mega_agentrl.reshard.planner.transfer_plan import ParamSliceIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.planner.transfer_plan import (
        Bucket,
        ParamSlice,
        TensorSlice,
        TransferPlan,
    )

CopyFn = Callable[["ParamSlice", torch.Tensor, torch.Tensor], None]
"""Copies from a slice of a parameter (third argument) to a frame (second argument).

The shapes are those of `DigestAccumulator.copy`.
"""

END_OF_UPDATE = -1
HEADER_BYTES = 32
_MAGIC = 0x6D65676157
_SLICE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class FramePart:
    """A tensor slice in a frame and in the shards of one rank."""

    tensor_slice: TensorSlice
    """The slice, in Hugging Face coordinates."""
    span: slice
    """Its bytes in the frame."""
    dtype: torch.dtype
    """Dtype in the frame."""
    param_slices: tuple[ParamSlice, ...]
    """Where this rank holds the slice: once on a trainer rank, at least once on a rollout rank."""

    def view(self, frame: torch.Tensor) -> torch.Tensor:
        """Return the slice's values as a view of a frame, shaped like its rectangle."""
        return frame[self.span].view(self.dtype).view(self.tensor_slice.rect.shape)


def num_frame_bytes(bucket: Bucket) -> int:
    """Return the size of the bucket's frame."""
    return HEADER_BYTES + sum(_align(tensor_slice.num_bytes) for tensor_slice in bucket.slices)


class FrameCodec:
    """Packs and unpacks the frames of one rank."""

    def __init__(self, plan: TransferPlan, layout: Iterable[ShardLayout]) -> None:
        self._dtype_of = {name: getattr(torch, dtype) for name, dtype in plan.dtype_of.items()}
        self._slice_index = ParamSliceIndex(layout)
        self._parts: dict[int, list[FramePart]] = {}

    def parts(self, bucket: Bucket) -> list[FramePart]:
        """Locate every slice of a bucket; raises `ValueError` for one not held by this rank."""
        if bucket.index not in self._parts:
            self._parts[bucket.index] = self._locate_parts(bucket)
        return self._parts[bucket.index]

    def _locate_parts(self, bucket: Bucket) -> list[FramePart]:
        offset = HEADER_BYTES
        parts = []
        for tensor_slice in bucket.slices:
            span = slice(offset, offset + tensor_slice.num_bytes)
            param_slices = tuple(self._slice_index.find(tensor_slice))
            parts.append(
                FramePart(tensor_slice, span, self._dtype_of[tensor_slice.hf_name], param_slices)
            )
            offset += _align(tensor_slice.num_bytes)
        return parts

    def write(
        self,
        bucket: Bucket,
        slot: torch.Tensor,
        shards: Mapping[str, torch.Tensor],
        version: int,
        copy_fn: CopyFn | None = None,
    ) -> torch.Tensor:
        """Pack a bucket at the start of `slot` and return the frame.

        Args:
            bucket: The bucket.
            slot: Buffer of at least `num_frame_bytes(bucket)` bytes.
            shards: Parameters by name, in any dtype.
            version: Weight version.
            copy_fn: Copies values into the frame; by default a plain copy.
        """
        frame = slot[: num_frame_bytes(bucket)]
        frame[:HEADER_BYTES].view(torch.int64).copy_(_header(version, bucket.index, len(frame)))
        for part in self.parts(bucket):
            param_slice = part.param_slices[0]
            values = shards[param_slice.param].detach()[param_slice.rect.slices]
            if copy_fn is not None:
                copy_fn(param_slice, part.view(frame), values)
            else:
                part.view(frame).copy_(values.reshape(part.tensor_slice.rect.shape))
        return frame

    def read(
        self, bucket: Bucket, frame: torch.Tensor
    ) -> Iterator[tuple[ParamSlice, torch.Tensor]]:
        """Yield every parameter slice with its values, shaped like its rectangle."""
        for part in self.parts(bucket):
            values = part.view(frame)
            for param_slice in part.param_slices:
                yield param_slice, values.view(param_slice.rect.shape)


def write_end_frame(slot: torch.Tensor, version: int) -> torch.Tensor:
    """Return the frame that closes an update."""
    frame = slot[:HEADER_BYTES]
    frame.view(torch.int64).copy_(_header(version, END_OF_UPDATE, HEADER_BYTES))
    return frame


def check_header(frame: torch.Tensor, version: int, bucket: Bucket | None) -> None:
    """Raise `ValueError` if a frame is not the expected one; `bucket` is None for the end frame."""
    index, size = (
        (bucket.index, num_frame_bytes(bucket)) if bucket else (END_OF_UPDATE, HEADER_BYTES)
    )
    expected = _header(version, index, size).tolist()
    got = frame[:HEADER_BYTES].view(torch.int64).tolist()
    if got == expected:
        return
    if got[0] != _MAGIC:
        cause = "the data received is not a frame"
    elif got[1] != version:
        cause = f"a frame of weight version {got[1]}"
    elif got[2] == index:
        cause = "the sender's bucket has another size; were the plans made from other layouts?"
    else:
        cause = f"a bucket was lost or sent twice: {_describe_frame(got[2])} arrived instead"
    raise ValueError(
        f"expected {_describe_frame(index)} of weight version {version} with {expected[3]} bytes, "
        f"header says [magic, version, bucket, bytes] {got}: {cause}"
    )


def _describe_frame(index: int) -> str:
    return "the end of the update" if index == END_OF_UPDATE else f"bucket {index}"


def _header(version: int, index: int, num_bytes: int) -> torch.Tensor:
    return torch.tensor([_MAGIC, version, index, num_bytes - HEADER_BYTES])


def _align(num_bytes: int) -> int:
    return round_up(num_bytes, _SLICE_ALIGN_BYTES)

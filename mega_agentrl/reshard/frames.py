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
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from mega_agentrl.errors import InputError
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

CopyFn = Callable[["PartBatch", torch.Tensor, "Mapping[str, torch.Tensor]"], None]
"""Copies parameters to a frame; the arguments are those of `PartBatch.pack`."""

END_OF_UPDATE = -1
HEADER_BYTES = 32
_MAGIC = 0x6D65676157
_SLICE_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class FramePart:
    """A tensor slice in a frame and in a parameter of one rank."""

    tensor_slice: TensorSlice
    """The slice, in Hugging Face coordinates."""
    span: slice
    """Byte range of the slice in the frame."""
    dtype: torch.dtype
    """Dtype in the frame."""
    param_slice: ParamSlice
    """Where this rank holds the slice."""

    def view(self, frame: torch.Tensor) -> torch.Tensor:
        """Return the values as a view of a frame, shaped like the slice of the parameter."""
        return frame[self.span].view(self.dtype).view(self.param_slice.rect.shape)

    def view_param(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the slice of the parameter."""
        return params[self.param_slice.param].detach()[self.param_slice.rect.slices]


@dataclass(frozen=True, slots=True, eq=False)
class PartBatch:
    """Parts of a frame that are copied together.

    Batches are made once per session and compared by identity, so that a copy function can cache
    what it prepares for a batch.
    """

    parts: tuple[FramePart, ...]

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of the parameters, each once."""
        return tuple(dict.fromkeys(part.param_slice.param for part in self.parts))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(part.param_slice.rect.numel for part in self.parts)

    def pack(self, frame: torch.Tensor, params: Mapping[str, torch.Tensor]) -> None:
        """Copy from parameters, of any dtype, to a frame."""
        for part in self.parts:
            part.view(frame).copy_(part.view_param(params))

    def unpack(self, frame: torch.Tensor, params: Mapping[str, torch.Tensor]) -> None:
        """Copy from a frame to parameters of any dtype."""
        for part in self.parts:
            part.view_param(params).copy_(part.view(frame))

    def split_by_module(self) -> list[tuple[str, PartBatch]]:
        """Return runs of parts of the same module, whose name is the parameters' common prefix."""
        runs = groupby(self.parts, lambda part: part.param_slice.param.rpartition(".")[0])
        return [(module, PartBatch(tuple(parts))) for module, parts in runs]


def num_frame_bytes(bucket: Bucket) -> int:
    """Return the size of the bucket's frame."""
    return HEADER_BYTES + sum(_align(tensor_slice.num_bytes) for tensor_slice in bucket.slices)


class FrameCodec:
    """Packs and unpacks the frames of one rank."""

    def __init__(self, plan: TransferPlan, layout: Iterable[ShardLayout]) -> None:
        self._dtype_of = {name: getattr(torch, dtype) for name, dtype in plan.dtype_of.items()}
        self._slice_index = ParamSliceIndex(layout)
        self._batches: dict[int, PartBatch] = {}

    def batch(self, bucket: Bucket) -> PartBatch:
        """Locate all slices of a bucket; raises `ValueError` for one not held by this rank.

        If a rollout rank holds a slice in several places, the batch has a part for each of them.
        """
        if bucket.index not in self._batches:
            self._batches[bucket.index] = PartBatch(tuple(self._locate_parts(bucket)))
        return self._batches[bucket.index]

    def _locate_parts(self, bucket: Bucket) -> Iterator[FramePart]:
        offset = HEADER_BYTES
        for tensor_slice in bucket.slices:
            span = slice(offset, offset + tensor_slice.num_bytes)
            dtype = self._dtype_of[tensor_slice.hf_name]
            for param_slice in self._slice_index.find(tensor_slice):
                yield FramePart(tensor_slice, span, dtype, param_slice)
            offset += _align(tensor_slice.num_bytes)

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
            copy_fn: Copies values to the frame; by default a plain copy.
        """
        frame = slot[: num_frame_bytes(bucket)]
        frame[:HEADER_BYTES].view(torch.int64).copy_(_header(version, bucket.index, len(frame)))
        (copy_fn or PartBatch.pack)(self.batch(bucket), frame, shards)
        return frame


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
        cause = f"the peer is sending weight version {got[1]}"
    elif got[2] == index:
        cause = "the sender's bucket has another size; were the plans made from other layouts?"
    else:
        cause = f"a bucket was lost or sent twice: {_describe_frame(got[2])} arrived instead"
    name = "header [magic, version, bucket, bytes]"
    wanted = f"{_describe_frame(index)} of weight version {version} with {expected[3]} bytes"
    raise InputError(name, got, wanted, cause)


def _describe_frame(index: int) -> str:
    return "the end of the update" if index == END_OF_UPDATE else f"bucket {index}"


def _header(version: int, index: int, num_bytes: int) -> torch.Tensor:
    return torch.tensor([_MAGIC, version, index, num_bytes - HEADER_BYTES])


def _align(num_bytes: int) -> int:
    return round_up(num_bytes, _SLICE_ALIGN_BYTES)

"""Digests of one rank's blocks, computed while values are copied from or to frames.

A batch of a frame's parts is copied with one call of a `CopyTable`, which is made when the batch is
copied for the first time. While a part that lies inside one block is copied, its digest
is added to the block's. The sum is valid if the parts covered the block exactly, without overlap.
Parts that no table can copy (because the dtype is converted, or the elements of a row are not
adjacent) are copied by torch, and the digests of their blocks must be computed from memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mega_agentrl.reshard.frames import PartBatch
from mega_agentrl.reshard.planner.transfer_plan import map_rect
from mega_agentrl.reshard.verify.copy_table import (
    CopyTable,
    MatrixCopy,
    prepare_kernel,
    supports_tables,
)

if TYPE_CHECKING:
    from mega_agentrl.reshard.frames import FramePart
    from mega_agentrl.reshard.layout import Rect
    from mega_agentrl.reshard.planner.transfer_plan import ParamSlice

_FRAME = 0
"""Index of the frame among the tensors of a table; the parameters follow."""


class ParamBlock(NamedTuple):
    """A rectangle of a parameter and the rectangle of the tensor it holds."""

    param: str
    """Name of the parameter."""
    local_rect: Rect
    """Rectangle in the parameter."""
    hf_rect: Rect
    """Rectangle in the Hugging Face tensor."""


class _BlockIndex:
    """Finds blocks by their position in a parameter; a stack of experts has hundreds."""

    def __init__(self, blocks: Sequence[ParamBlock]) -> None:
        self._entries: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """First row or expert and index of each block, ascending, by parameter."""
        self._max_stops: dict[str, list[int]] = defaultdict(list)
        """One past the last row or expert of a block or of any before it."""
        for index, block in enumerate(blocks):
            self._entries[block.param].append((block.local_rect.start[0], index))
        for param, entries in self._entries.items():
            entries.sort()
            stops = (blocks[index].local_rect.stop[0] for _, index in entries)
            self._max_stops[param] = list(accumulate(stops, max))

    def find(self, param_slice: ParamSlice) -> list[int]:
        """Return the indices of all blocks that overlap with a slice in the first dim."""
        param, rect = param_slice
        if param not in self._entries:
            return []
        first = bisect_right(self._max_stops[param], rect.start[0])
        last = bisect_left(self._entries[param], (rect.stop[0],))
        return [index for _, index in self._entries[param][first:last]]


class _TensorType(NamedTuple):
    """Properties of a tensor, other than its address, on which a prepared copy depends."""

    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PreparedBatch:
    """The copies of a batch."""

    param_names: tuple[str, ...]
    """Names of the parameters, by their indices in the table less one."""
    types: tuple[_TensorType, ...]
    """Types of the frame and the parameters for which the table was made."""
    table: CopyTable
    rects_of_block: dict[int, tuple[Rect, ...]]
    """Local rectangles that the table copies, by index of the block."""
    torch_parts: PartBatch
    """Parts that torch copies."""
    undigested_blocks: frozenset[int]
    """Blocks that overlap with `torch_parts`, so that they get no digest from copies."""


class DigestAccumulator:
    """Accumulates the digests of one rank's blocks, which are identified by index.

    Args:
        blocks: All blocks.
        to_frame: Whether values are copied from parameters to frames, or from frames to parameters.
    """

    def __init__(self, blocks: Sequence[ParamBlock], *, to_frame: bool) -> None:
        self._blocks, self._to_frame = blocks, to_frame
        self._block_index = _BlockIndex(blocks)
        self._prepared_batches: dict[PartBatch, _PreparedBatch] = {}
        self._sum_D2 = torch.zeros(len(blocks), 2, dtype=torch.int32)
        self._last_cover: list[list[tuple[Rect, ...]] | None] = [None] * len(blocks)
        """Rectangles that covered each block the last time; they rarely change."""
        self.reset()
        prepare_kernel()  # when a rank joins, not during its first update

    def reset(self) -> None:
        """Discard all sums."""
        self._sum_D2.zero_()
        self._copied_rects: list[list[tuple[Rect, ...]] | None] = [[] for _ in self._blocks]
        """Local rectangles included in the sum, or None if the block has no valid sum."""

    def copy(
        self, batch: PartBatch, frame: torch.Tensor, params: Mapping[str, torch.Tensor]
    ) -> None:
        """Pack or unpack a batch, like `PartBatch`, and add the digests of the copied values."""
        prepared = self._prepared_batches.get(batch)
        names = batch.param_names if prepared is None else prepared.param_names
        tensors = [frame, *(params[name] for name in names)]
        types = tuple(_TensorType(t.dtype, t.device, t.stride()) for t in tensors)
        if prepared is None or prepared.types != types:
            prepared = self._prepared_batches[batch] = self._prepare(batch, names, types)
        if self._sum_D2.device != frame.device:
            self._sum_D2 = self._sum_D2.to(frame.device)
        if prepared.rects_of_block:
            prepared.table.run(tensors, self._sum_D2)
        torch_parts = prepared.torch_parts
        (torch_parts.pack if self._to_frame else torch_parts.unpack)(frame, params)
        for index, rects in prepared.rects_of_block.items():
            copied_rects = self._copied_rects[index]
            if copied_rects is not None:
                copied_rects.append(rects)
        for index in prepared.undigested_blocks:
            self._copied_rects[index] = None

    def is_covered(self, index: int) -> bool:
        """Return whether the copies covered a block; only then its digest is valid."""
        rects = self._copied_rects[index]
        if rects is None or not (rects == self._last_cover[index] or self._covers(index, rects)):
            return False
        self._last_cover[index] = rects
        return True

    def digests(self) -> np.ndarray:
        """Return `[blocks, 2]` uint32 digests, which are valid only for covered blocks."""
        sums: np.ndarray = self._sum_D2.numpy(force=True).view(np.uint32).copy()
        return sums

    def _covers(self, index: int, rects: Sequence[tuple[Rect, ...]]) -> bool:
        """Return whether the rectangles, which lie inside the block, cover it without overlap."""
        flat = list(chain.from_iterable(rects))
        numel = sum(rect.numel for rect in flat)
        return numel == self._blocks[index].local_rect.numel and all(
            first.intersect(second) is None for first, second in combinations(flat, 2)
        )

    def _prepare(
        self, batch: PartBatch, names: tuple[str, ...], types: tuple[_TensorType, ...]
    ) -> _PreparedBatch:
        copies: list[MatrixCopy] = []
        rects_of_block: dict[int, tuple[Rect, ...]] = {}
        torch_parts: list[FramePart] = []
        undigested_blocks: set[int] = set()
        has_tables = len({t.device for t in types}) == 1 and supports_tables(types[_FRAME].device)
        tensor_of = {name: number for number, name in enumerate(names, start=_FRAME + 1)}
        for part in batch.parts:
            param, rect = part.param_slice
            overlaps = {
                index: self._blocks[index].local_rect.intersect(rect)
                for index in self._block_index.find(part.param_slice)
            }
            indices = [index for index, overlap in overlaps.items() if overlap is not None]
            copy = None
            if has_tables and len(indices) == 1 and overlaps[indices[0]] == rect:
                tensor = tensor_of[param]
                copy = self._matrix_copy(part, indices[0], tensor, types[tensor])
            if copy is None:
                torch_parts.append(part)
                undigested_blocks.update(indices)
            else:
                copies.append(copy)
                rects_of_block[indices[0]] = (*rects_of_block.get(indices[0], ()), rect)
        return _PreparedBatch(
            names,
            types,
            CopyTable(copies),
            rects_of_block,
            PartBatch(tuple(torch_parts)),
            frozenset(undigested_blocks),
        )

    def _matrix_copy(
        self, part: FramePart, index: int, tensor: int, tensor_type: _TensorType
    ) -> MatrixCopy | None:
        """Return the copy of a part that lies inside a block, or None if no table can copy it."""
        block, rect = self._blocks[index], part.param_slice.rect
        hf_rect = map_rect(rect, block.local_rect, block.hf_rect)
        item_bytes = part.dtype.itemsize
        if tensor_type.dtype != part.dtype or item_bytes not in (2, 4):
            return None
        if not 1 <= len(hf_rect.start) <= 2:
            return None
        num_columns = hf_rect.shape[-1]
        num_rows = hf_rect.numel // num_columns
        strides = [
            stride
            for extent, stride in zip(rect.shape, tensor_type.strides, strict=True)
            if extent > 1
        ]
        if num_columns > 1 and strides[-1] != 1:
            return None
        offset = sum(map(mul, rect.start, tensor_type.strides))
        stride = strides[0] if num_rows > 1 else num_columns
        in_frame = (_FRAME, part.span.start // item_bytes, num_columns)
        in_param = (tensor, offset, stride)
        source, target = (in_param, in_frame) if self._to_frame else (in_frame, in_param)
        first_row, first_column = (0, *hf_rect.start)[-2:]
        return MatrixCopy(
            item_bytes, *source, *target, num_rows, num_columns, first_row, first_column, index
        )

"""Digests of values that are being copied, in the same pass over memory.

An accumulator belongs to one rank and knows its blocks: rectangles of Hugging Face tensors and
where the rank's parameters hold them, by the rank's own layout. Parameters are written (or read)
slice by slice. While a slice that lies inside one block is copied, its digest is added to the
block's. The plan determines only the order of the slices.

A sum is valid if the slices covered the block exactly, without overlap. Any other block (written
twice, or by a copy that converts the dtype) has no digest here, and the caller computes it from
memory.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mega_agentrl.reshard.planner.transfer_plan import map_rect
from mega_agentrl.reshard.verify.copy_digest_kernel import compile_kernel
from mega_agentrl.reshard.verify.digest import CopyWithDigest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.reshard.layout import Rect
    from mega_agentrl.reshard.planner.transfer_plan import ParamSlice


class ParamBlock(NamedTuple):
    """A rectangle of a parameter and the rectangle of the tensor it holds."""

    param: str
    """Name of the parameter."""
    local_rect: Rect
    """Rectangle in the parameter."""
    hf_rect: Rect
    """Rectangle in the Hugging Face tensor."""


class DigestAccumulator:
    """Digests of the blocks of one rank, which are referred to by index."""

    def __init__(self, blocks: Sequence[ParamBlock]) -> None:
        self._blocks = blocks
        self._blocks_by_param: dict[str, list[int]] = {}
        for index, block in enumerate(blocks):
            self._blocks_by_param.setdefault(block.param, []).append(index)
        self._copiers: dict[ParamSlice, tuple[list[int], CopyWithDigest | None]] = {}
        """By slice, the blocks it overlaps and, if it lies inside one, how to digest it."""
        self._sums = np.zeros((len(blocks), 2), dtype=np.uint32)
        self._sums_address = self._sums.ctypes.data
        self._last_cover: list[list[Rect] | None] = [None] * len(blocks)
        """Rectangles that covered the block the last time; they rarely change."""
        self.reset()
        if not torch.cuda.is_available():
            compile_kernel()  # when a rank joins, not during its first update

    def reset(self) -> None:
        """Discard all sums."""
        self._sums[:] = 0
        self._copied_rects: list[list[Rect] | None] = [[] for _ in self._blocks]
        """Local rectangles included in the sum, or None if the block has no valid sum."""

    def copy(self, param_slice: ParamSlice, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to `to`, of the same number of elements, and add their digest.

        `param_slice` is the rectangle of the parameter that is written or read.
        """
        entry = self._copiers.get(param_slice)
        if entry is None:
            entry = self._copiers[param_slice] = self._make_copier(param_slice)
        indices, copier = entry
        if copier is not None:
            rects = self._copied_rects[indices[0]]
            sums_at = self._sums_address + 8 * indices[0]
            if rects is not None and copier.copy(to, values, sums_at):
                rects.append(param_slice.rect)
                return
        to.copy_(values.view(to.shape))
        for index in indices:
            self._copied_rects[index] = None

    def digest_of_block(self, index: int) -> np.ndarray | None:
        """Return `[2]` uint32, or None if the digest must be computed from memory."""
        rects = self._copied_rects[index]
        if rects is None or not (rects == self._last_cover[index] or self._covers(index, rects)):
            return None
        self._last_cover[index] = rects
        found: np.ndarray = self._sums[index]
        return found

    def _covers(self, index: int, rects: list[Rect]) -> bool:
        """Return whether the rectangles, which lie inside the block, cover it without overlap."""
        covered = sum(rect.numel for rect in rects)
        return covered == self._blocks[index].local_rect.numel and all(
            one.intersect(other) is None for one, other in combinations(rects, 2)
        )

    def _make_copier(self, param_slice: ParamSlice) -> tuple[list[int], CopyWithDigest | None]:
        common = {
            n: self._blocks[n].local_rect.intersect(param_slice.rect)
            for n in self._blocks_of_param(param_slice.param)
        }
        indices = [index for index, rect in common.items() if rect is not None]
        if len(indices) != 1 or common[indices[0]] != param_slice.rect:
            return indices, None
        block = self._blocks[indices[0]]
        return indices, CopyWithDigest(map_rect(param_slice.rect, block.local_rect, block.hf_rect))

    def _blocks_of_param(self, param: str) -> list[int]:
        return self._blocks_by_param.get(param, [])

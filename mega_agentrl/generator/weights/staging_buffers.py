"""Host memory for modules whose weights are arriving, reused from module to module.

In the heap, these modules would lie between the buffers that vLLM packs from them and leave holes:
tensors are aligned, and an aligned one does not fit into a hole of its own size. The heap would
then grow with the size of the model, however few modules are in progress at a time.

Buffers are mapped outside the heap, with huge pages if available. A buffer is free again when the
last tensor on it is gone. There are never more buffers than modules in progress, and none is larger
than the largest module.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_STAGING_BYTES = 1 << 20
"""Smaller modules stay in the heap."""
_PARAM_ALIGN_BYTES = 64


class StagingBufferPool:
    """Buffers of one rank; not thread-safe."""

    def __init__(self) -> None:
        self._free_buffers: list[mmap.mmap] = []

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return `[size]` uint8 tensors with undefined values, for the parameters of one module.

        Args:
            sizes: Sizes in bytes.
        """
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _PARAM_ALIGN_BYTES) * _PARAM_ALIGN_BYTES)
        buffer = self._take_buffer(starts[-1])
        view = memoryview(buffer)
        weakref.finalize(view, self._free_buffers.append, buffer)
        flat = torch.frombuffer(view, dtype=torch.uint8)
        return [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def clear(self) -> None:
        """Return free buffers to the system."""
        self._free_buffers.clear()

    def _take_buffer(self, num_bytes: int) -> mmap.mmap:
        """Return the smallest free buffer that fits, or a new one in place of the largest."""
        found = min((r for r in self._free_buffers if len(r) >= num_bytes), key=len, default=None)
        old = max(self._free_buffers, key=len, default=None) if found is None else found
        if old is not None:
            self._free_buffers.remove(old)
        return found if found is not None else _map_anonymous(num_bytes)


def _map_anonymous(num_bytes: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer

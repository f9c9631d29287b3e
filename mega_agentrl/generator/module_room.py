"""Memory of the host for modules that are on their way in, used again for one after another.

From the heap, every module would lie beside the holes of those before it: what vLLM and its
kernels allocate is aligned, and an aligned block finds no place in a hole of its own size. So
the heap grows by the model's size, a good part of it, however few modules are under way.

Rooms are mapped apart from the heap. One is free again when the last tensor on it is gone, so
that whoever keeps a tensor keeps its values. There are as many as modules were under way at the
same time, and none is larger than the largest module.
"""

from __future__ import annotations

import mmap
import weakref

import torch

LEAST_BYTES = 1 << 20
"""Modules smaller than that may lie in the heap."""


class ModuleRooms:
    """Of one rank. One thread."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def lend(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8, values undefined; in the smallest free room that is large enough."""
        large = [room for room in self._free if len(room) >= num_bytes]
        if large:
            room = min(large, key=len)
            self._free.remove(room)
        else:
            if self._free:  # in its place, so that there is not one more
                self._free.remove(max(self._free, key=len))
            room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(room)
        weakref.finalize(view, self._free.append, room)
        return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes)

    def clear(self) -> None:
        """Give back what is free."""
        self._free.clear()

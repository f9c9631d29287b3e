"""Memory of the host for modules that are on their way in, used again for one after another.

From the heap, modules would lie between what vLLM packs from them, and leave holes: tensors are
aligned, and an aligned one finds no place in a hole of its own size. So the heap would grow with
the size of the model, however few modules are under way at a time.

Rooms are mapped apart from the heap, in large pages where there are any. A room is free again
when the last tensor on it is gone, so whoever keeps a tensor keeps its values. There are never
more rooms than modules under way at the same time, and none is larger than the largest module.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_BYTES = 1 << 20
"""What is smaller may lie in the heap."""
_ALIGN = 64


class ModuleRooms:
    """Of one rank; one thread."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def lend(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """[size] uint8 each, values undefined, for the parameters of a module; sizes in bytes."""
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _ALIGN) * _ALIGN)
        room = self._find(starts[-1])
        view = memoryview(room)
        weakref.finalize(view, self._free.append, room)
        whole = torch.frombuffer(view, dtype=torch.uint8)
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def clear(self) -> None:
        """Give back what is free."""
        self._free.clear()

    def _find(self, num_bytes: int) -> mmap.mmap:
        """The smallest free room that is large enough, else a new one in place of the largest."""
        found = min((r for r in self._free if len(r) >= num_bytes), key=len, default=None)
        old = max(self._free, key=len, default=None) if found is None else found
        if old is not None:
            self._free.remove(old)
        return found if found is not None else _map(num_bytes)


def _map(num_bytes: int) -> mmap.mmap:
    room = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return room

"""Flat ranges of a parameter as rectangles of Hugging Face tensors.

Under the distributed optimizer a data-parallel rank holds the elements [start, stop) of a
flattened parameter. Such a range is at most three rectangles of the matrix (the rest of a row,
whole rows, the beginning of a row), and each of them intersects the blocks of the parameter's
`ShardLayout` in rectangles. Hence every range maps to rectangles of Hugging Face tensors, by
which checkpoints are keyed: they contain neither the parallel layout nor padding.

All results are views of the parameter: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect

if TYPE_CHECKING:
    import torch

    from mega_agentrl.reshard.layout import ShardLayout


def rects_of_flat_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rect]:
    """Yield the rectangles of a vector or matrix that hold its flat elements [start, stop)."""
    if len(shape) == 1:
        if start < stop:
            yield Rect((start,), (stop,))
        return
    _, width = shape
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(width, column + stop - start)
            yield Rect((row, column), (row + 1, end))
            start += end - column
        else:
            last = stop // width
            yield Rect((row, 0), (last, width))
            start = last * width


def iter_hf_views(
    shard: ShardLayout, run: torch.Tensor, start: int = 0
) -> Iterator[tuple[str, Rect, torch.Tensor]]:
    """Yield (Hugging Face name, rectangle in that tensor, view) of every element with a name.

    Args:
        shard: Layout of the parameter.
        run: `[n]` elements start .. start + n - 1 of the flat parameter.
        start: First element of `run`.
    """
    offset = 0
    for rect in rects_of_flat_range(shard.shape, start, start + run.numel()):
        local = run[offset : offset + rect.numel].view(rect.shape)
        offset += rect.numel
        for block in shard.blocks:
            common = rect.intersect(block.local_rect)
            if common is not None:
                inside = common.translate(rect.start, (0,) * len(rect.start))
                hf_rect = common.translate(block.local_rect.start, block.hf_rect.start)
                yield block.hf_name, hf_rect, local[inside.slices]

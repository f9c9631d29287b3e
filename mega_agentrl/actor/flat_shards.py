"""A run of elements of one rank's parameter, as rectangles of Hugging Face tensors.

A parameter's elements lie in a row, last dim fastest; a data-parallel rank of the distributed
optimizer holds elements [start, stop) of it. Such a run is at most three boxes of the matrix
(the rest of a row, whole rows, the beginning of a row), and each box meets the blocks of the
parameter's `ShardLayout` in boxes again. So any run has its place in the Hugging Face tensors,
which is what checkpoints are keyed by: no cut of the model appears in them, nor its padding.

Views only: nothing is copied, and what is written into a view is in the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Rect

if TYPE_CHECKING:
    import torch

    from mega_agentrl.reshard.layout import ShardLayout


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rect]:
    """Boxes of a vector or matrix that hold its elements [start, stop), in order."""
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


def hf_views(
    shard: ShardLayout, run: torch.Tensor, start: int = 0
) -> Iterator[tuple[str, Rect, torch.Tensor]]:
    """(Hugging Face name, rectangle in that tensor, view of `run`) of everything in the run.

    run: [n] the elements start .. start+n-1 of the parameter that `shard` describes.
    """
    offset = 0
    for box in boxes(shard.shape, start, start + run.numel()):
        local = run[offset : offset + box.numel].view(box.shape)
        offset += box.numel
        for block in shard.blocks:
            common = box.intersect(block.local_rect)
            if common is not None:
                inside = common.shifted(box.start, (0,) * len(box.start))
                hf_rect = common.shifted(block.local_rect.start, block.hf_rect.start)
                yield block.hf_name, hf_rect, local[inside.slices]

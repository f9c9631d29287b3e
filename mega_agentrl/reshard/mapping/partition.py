"""The ways in which Hugging Face tensors become a parameter of one rank.

    replicate      the tensor itself, the same on every rank
    slice_columns  an equal share of a matrix's columns
    stack_rows     rows of several tensors stacked, of which the rank holds a window; rows beyond
                   the last tensor are padding

A bias is sharded like the rows of its matrix, with an empty `row_shape`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout


@dataclass(frozen=True, slots=True)
class RowRange:
    """`num_rows` rows of a Hugging Face tensor, from row `start`."""

    hf_name: str
    start: int
    num_rows: int


def replicate(name: str, hf_name: str, shape: tuple[int, ...]) -> ShardLayout:
    """Return a parameter that equals a Hugging Face tensor."""
    rect = Rect.whole(shape)
    return ShardLayout(name, shape, (Block(hf_name, rect, rect),))


def slice_columns(
    name: str, hf_name: str, full_shape: tuple[int, int], *, rank: int, size: int
) -> ShardLayout:
    """Return the columns that rank `rank` of `size` holds of a matrix of shape `full_shape`."""
    rows, width = full_shape[0], full_shape[1] // size
    hf_rect = Rect((0, rank * width), (rows, (rank + 1) * width))
    return ShardLayout(name, (rows, width), (Block(hf_name, hf_rect, Rect.whole((rows, width))),))


def stack_rows(
    name: str,
    parts: Iterable[RowRange],
    row_shape: tuple[int, ...],
    *,
    window: tuple[int, int] | None = None,
) -> ShardLayout:
    """Return the rows window[0] .. window[1]-1 of all parts stacked in order.

    Args:
        name: Parameter name.
        parts: Rows to stack.
        row_shape: Shape of one row: `(hidden,)` for a matrix, `()` for a bias.
        window: First row and end of the rank's rows, or None for all.
    """
    parts = list(parts)
    first, last = window or (0, sum(part.num_rows for part in parts))
    blocks, offset, zeros = [], 0, (0,) * len(row_shape)
    for part in parts:
        low, high = max(offset, first), min(offset + part.num_rows, last)
        if low < high:
            shift = part.start - offset
            hf_rect = Rect((low + shift, *zeros), (high + shift, *row_shape))
            local_rect = Rect((low - first, *zeros), (high - first, *row_shape))
            blocks.append(Block(part.hf_name, hf_rect, local_rect))
        offset += part.num_rows
    return ShardLayout(name, (last - first, *row_shape), tuple(blocks))

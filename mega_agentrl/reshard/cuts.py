"""The few ways in which a Hugging Face tensor becomes a parameter of one rank.

    whole    the tensor itself, the same on every rank
    columns  an equal share of a matrix's columns
    stacked  rows of several tensors one below another, of which the rank holds a window; more
             rows than there are tensors for are padding

A bias is cut like the rows of its matrix: `tail`, the shape of one row, is then empty.
Pure data; knows neither models nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of a Hugging Face tensor, from row `start`."""

    hf_name: str
    start: int
    count: int


def whole(name: str, hf_name: str, shape: tuple[int, ...]) -> ShardLayout:
    """A parameter that is a Hugging Face tensor."""
    rect = Rect.whole(shape)
    return ShardLayout(name, shape, (Block(hf_name, rect, rect),))


def columns(name: str, hf_name: str, full: tuple[int, int], *, rank: int, size: int) -> ShardLayout:
    """Columns of one of `size` ranks of a matrix of shape `full`."""
    rows, width = full[0], full[1] // size
    hf_rect = Rect((0, rank * width), (rows, (rank + 1) * width))
    return ShardLayout(name, (rows, width), (Block(hf_name, hf_rect, Rect.whole((rows, width))),))


def stacked(
    name: str,
    parts: Iterable[Rows],
    tail: tuple[int, ...],
    *,
    window: tuple[int, int] | None = None,
) -> ShardLayout:
    """Rows window[0] .. window[1]-1 of all parts one below another; None for all of them.

    tail: shape of one row, `(hidden,)` of a matrix and `()` of a bias.
    """
    parts = list(parts)
    first, last = window or (0, sum(part.count for part in parts))
    blocks, offset, zeros = [], 0, (0,) * len(tail)
    for part in parts:
        low, high = max(offset, first), min(offset + part.count, last)
        if low < high:
            shift = part.start - offset
            hf_rect = Rect((low + shift, *zeros), (high + shift, *tail))
            local_rect = Rect((low - first, *zeros), (high - first, *tail))
            blocks.append(Block(part.hf_name, hf_rect, local_rect))
        offset += part.count
    return ShardLayout(name, (last - first, *tail), tuple(blocks))

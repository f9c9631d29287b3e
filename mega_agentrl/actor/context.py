"""The cut of packed rows over context ranks, and their exchange of keys and values.

With C context ranks each row has a length that is a multiple of 2C and is cut into 2C equal
chunks; rank r holds chunks r and 2C-1-r of every row, one after the other. All ranks then hold
equally many tokens and score equally many (query, key) pairs under a causal mask (the cut of
arXiv 2407.21783, section 3.3.2, and of Transformer Engine). Keys and values are gathered whole
before the attention, queries never move.

Suffixes: S tokens of this rank, W = C * S tokens of the whole packing, R packed rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence


def row_multiple(size: int) -> int:
    """What the length of a packed row must be a multiple of."""
    return 2 * size if size > 1 else 1


def spans(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """(first, last + 1) positions of a row of `length` tokens that a context rank holds."""
    if size == 1:
        return [(0, length)]
    chunk, rest = divmod(length, 2 * size)
    assert rest == 0, f"a row of {length} tokens over {size} context ranks"
    return [(index * chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)]


def held_tokens(start_R: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """[S] int64 places in the whole packing of the tokens that a context rank holds, in order.

    start_R: [R + 1] first token of each row in the whole packing, and W.
    """
    return torch.cat(
        [
            torch.arange(start + first, start + last)
            for start, stop in pairwise(start_R)
            for first, last in spans(stop - start, rank, size)
        ]
    )


def gathered_places(start_R: Sequence[int], size: int) -> torch.Tensor:
    """[W] int64: where in `gather_tokens`' result each token of the whole packing lies."""
    order_W = torch.cat([held_tokens(start_R, rank, size) for rank in range(size)])
    place_W = torch.empty_like(order_W)
    place_W[order_W] = torch.arange(len(order_W))
    return place_W


def gather_tokens(value_S: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[S, ...] of every context rank to [W, ...], by rank; S is the same on all of them.

    Its gradient is summed over the ranks and each gets its own tokens' part.
    Waits for: the context ranks, forward and backward. Unblocked by: them, or the group's
    deadline.
    """
    return _Gather.apply(value_S, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_S: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out_W = value_S.new_empty(group.size() * value_S.size(0), *value_S.shape[1:])
        dist.all_gather_single(out_W, value_S.contiguous(), group=group)
        return out_W

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_W: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        grad_S = grad_W.new_empty(grad_W.size(0) // size, *grad_W.shape[1:])
        dist.reduce_scatter_single(grad_S, grad_W.contiguous(), group=ctx.group)
        return grad_S, None

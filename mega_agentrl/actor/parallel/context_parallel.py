"""Context parallelism: how packed trees are split over ranks, and the gathering of keys.

With C context ranks the length of each tree is padded to a multiple of 2C and the tree is split
into 2C equal chunks; rank r holds chunks r and 2C-1-r of every tree. All ranks then hold the
same number of tokens and, where a tree is a single row, compute the same number of attention
scores under a causal mask (arXiv:2407.21783, section 3.3.2; Transformer Engine does the same). Keys
and values of all ranks are gathered before the attention; queries stay where they are.

Shape suffixes: S tokens of this rank, W = C * S tokens of all ranks, G packed trees.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence


def tree_length_multiple(size: int) -> int:
    """Return the number that the length of a packed tree must be a multiple of."""
    return 2 * size if size > 1 else 1


def rank_token_spans(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the (first, last + 1) spans of a tree of `length` tokens that a rank holds."""
    if size == 1:
        return [(0, length)]
    chunk_length, remainder = divmod(length, 2 * size)
    assert remainder == 0, f"a tree of {length} tokens has no {2 * size} equal chunks"
    return [
        (index * chunk_length, (index + 1) * chunk_length) for index in (rank, 2 * size - 1 - rank)
    ]


def rank_token_indices(start_G: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Return the `[S]` int64 indices into the W packed tokens that a context rank holds.

    `start_G` holds the first token of each tree in the W packed tokens, and W.
    """
    return torch.cat(
        [
            torch.arange(start + first, start + last)
            for start, stop in pairwise(start_G)
            for first, last in rank_token_spans(stop - start, rank, size)
        ]
    )


def gathered_token_indices(start_G: Sequence[int], size: int) -> torch.Tensor:
    """Return the `[W]` int64 index of each packed token in the result of `all_gather_tokens`."""
    order_W = torch.cat([rank_token_indices(start_G, rank, size) for rank in range(size)])
    index_W = torch.empty_like(order_W)
    index_W[order_W] = torch.arange(len(order_W))
    return index_W


def all_gather_tokens(value_S: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather `[S, ...]` of every context rank to `[W, ...]`, ordered by rank.

    S must be the same on all ranks. The backward pass sums the gradients over the ranks and
    returns to each rank the part of its own tokens. Both passes wait for all ranks of the group, at
    most for the group's timeout.
    """
    return _AllGatherTokens.apply(value_S, group)


class _AllGatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value_S: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out_W = value_S.new_empty(group.size() * value_S.size(0), *value_S.shape[1:])
        dist.all_gather_into_tensor(out_W, value_S.contiguous(), group=group)
        return out_W

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_W: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        grad_S = grad_W.new_empty(grad_W.size(0) // size, *grad_W.shape[1:])
        dist.reduce_scatter_tensor(grad_S, grad_W.contiguous(), group=ctx.group)
        return grad_S, None

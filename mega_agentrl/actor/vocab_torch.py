"""Statistics and gradients of one rank's vocabulary columns, with torch's matrix products.

Logits exist for one tile at a time, [C tokens, at most 2,048 rows of the vocabulary], small
enough to stay in a core's share of the cache, where the passes over them cost a fraction of the
product that makes them. Each tile's statistics are merged into the running ones of its tokens
(online softmax); the backward pass computes each tile again and turns it into its gradient in
place. Any floating-point type, any device.

Knows no groups: columns are this rank's, -1 where a token's target is not here.

Suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block, D hidden.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.actor.vocab_softmax import Slopes, merge, no_columns
from mega_agentrl.actor.vocab_tiles import accumulate, compute_dtype, cut, sum_gradients

# Rows of the vocabulary in a tile: long enough for full speed of the matrix product.
BLOCK_ROWS = 2048


def chunk_tokens(hidden_ND: torch.Tensor, num_rows: int, num_bytes: int) -> int:
    """Tokens computed at once, so that the two tiles they need fit into `num_bytes`."""
    return _tile(hidden_ND.dtype, num_rows, num_bytes)[0]


def local_stats(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    column_C: torch.Tensor,
    temperature: float,
    num_bytes: int,
) -> torch.Tensor:
    """[4, C] float64 statistics (see `vocab_softmax`) of the columns of `weight_VD`.

    column_C: [C] int64, row of `weight_VD` that is the target, -1 where none is.
    """
    stats_4C = no_columns(len(hidden_CD), hidden_CD.device)
    scratch = _Scratch(hidden_CD, len(weight_VD), num_bytes)
    for rows in scratch.blocks:
        raw_CB, other_CB = scratch.tiles(len(hidden_CD), rows)
        accumulate(raw_CB, hidden_CD, weight_VD[rows].t(), fresh=True)
        block_4C = _block_stats(raw_CB, other_CB, column_C - rows.start, temperature)
        stats_4C = merge(torch.stack([stats_4C, block_4C]))
    return stats_4C


def gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    column_N: torch.Tensor,
    slopes: Slopes,
    temperature: float,
    num_bytes: int,
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Gradients through these columns; the last two arguments are `sum_gradients`'s."""
    scratch = _Scratch(hidden_ND, len(weight_VD), num_bytes)

    def tile_gradient(tokens: slice, rows: slice) -> torch.Tensor:
        raw_CB, other_CB = scratch.tiles(tokens.stop - tokens.start, rows)
        accumulate(raw_CB, hidden_ND[tokens], weight_VD[rows].t(), fresh=True)
        column_C = column_N[tokens] - rows.start
        return _tile_gradient(raw_CB, other_CB, column_C, slopes.part(tokens), temperature)

    sum_gradients(
        hidden_ND,
        weight_VD,
        tile_gradient,
        scratch.chunks,
        scratch.blocks,
        grad_hidden_ND,
        grad_weight_VD,
    )


class _Scratch:
    """Two tiles of logits, allocated once, and how tokens and rows are cut to fit them."""

    def __init__(self, hidden_ND: torch.Tensor, num_rows: int, num_bytes: int) -> None:
        step, width = _tile(hidden_ND.dtype, num_rows, num_bytes)
        self.chunks = list(cut(len(hidden_ND), step))
        self.blocks = list(cut(num_rows, width))
        self._buffer = hidden_ND.new_empty(
            2, min(step, len(hidden_ND)) * width, dtype=compute_dtype(hidden_ND.dtype)
        )

    def tiles(self, num_tokens: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [C, B], the same memory at every call."""
        width = rows.stop - rows.start
        first, second = self._buffer[:, : num_tokens * width].unbind()
        return first.view(num_tokens, width), second.view(num_tokens, width)


def _tile(dtype: torch.dtype, num_rows: int, num_bytes: int) -> tuple[int, int]:
    """Tokens and rows of a tile, two of which take `num_bytes`."""
    elements = max(1, num_bytes // (2 * compute_dtype(dtype).itemsize))
    width = max(1, min(num_rows, BLOCK_ROWS, math.isqrt(2 * elements)))
    return max(1, elements // width), width


def _locate(column_C: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[C, 1] column of each target within a block, and whether it is there."""
    here_C = (column_C >= 0) & (column_C < width)
    return (column_C * here_C)[:, None], here_C[:, None]


def _block_stats(
    raw_CB: torch.Tensor, other_CB: torch.Tensor, column_C: torch.Tensor, temperature: float
) -> torch.Tensor:
    """[4, C] float64 of one tile, whose contents and the other tile's are used up."""
    index_C1, here_C1 = _locate(column_C, raw_CB.size(1))
    target_C = raw_CB.gather(1, index_C1).masked_fill_(~here_C1, -torch.inf).squeeze(1)
    max_C = raw_CB.amax(dim=1)
    x_CB = _scaled(raw_CB.sub_(max_C[:, None]), temperature)
    exp_CB = torch.exp(x_CB, out=other_CB)
    sum_C = exp_CB.sum(dim=1)
    weighted_C = exp_CB.mul_(x_CB).sum(dim=1)
    return torch.stack(
        [
            max_C.double() / temperature,
            sum_C.double(),
            weighted_C.double(),
            target_C.double() / temperature,
        ]
    )


def _tile_gradient(
    raw_CB: torch.Tensor,
    other_CB: torch.Tensor,
    column_C: torch.Tensor,
    slopes: Slopes,
    temperature: float,
) -> torch.Tensor:
    """[C, B] gradient of the raw logits, in their place; the other tile is used up too."""
    x_CB = _scaled(raw_CB.sub_(slopes.center_N[:, None]), temperature)
    if slopes.slope_N is None:
        grad_CB = x_CB.exp_().mul_(-slopes.constant_N[:, None])
    else:
        exp_CB = torch.exp(x_CB, out=other_CB)
        x_CB.mul_(-slopes.slope_N[:, None]).sub_(slopes.constant_N[:, None])
        grad_CB = x_CB.mul_(exp_CB)
    index_C1, here_C1 = _locate(column_C, raw_CB.size(1))
    return grad_CB.scatter_add_(1, index_C1, slopes.target_N[:, None] * here_C1)


def _scaled(x_CB: torch.Tensor, temperature: float) -> torch.Tensor:
    # The maximum is gone by now, so the division costs at most the last digit.
    return x_CB if temperature == 1.0 else x_CB.mul_(1.0 / temperature)

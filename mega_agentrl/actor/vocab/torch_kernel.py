"""Statistics and gradients of one rank's vocabulary columns, with torch's matrix products.

Logits exist for one tile at a time, of C tokens and at most 2,048 rows of the vocabulary. A tile
fits into the CPU cache, so the passes over it are cheap compared to the matrix product. The
statistics of a tile are merged into the running statistics of its tokens (online softmax); the
backward pass recomputes each tile and turns it into its gradient in place. Any floating-point dtype
and device works.

A column of the logits belongs to a row of the output layer's weight. A token's `column` is the
local index of its target, or -1 if another rank holds it.

Shape suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block,
D hidden width.
"""

from __future__ import annotations

import math

import torch

from mega_agentrl.actor.matmul import matmul_accumulate
from mega_agentrl.actor.vocab.partial_softmax import LogitGradCoefficients, empty_stats, merge_stats
from mega_agentrl.actor.vocab.tiling import (
    accumulate_gradients,
    compute_dtype,
    split_range,
)

# Vocabulary rows of a tile: enough for full speed of the matrix product.
BLOCK_ROWS = 2048


def chunk_tokens(hidden_ND: torch.Tensor, num_rows: int, num_bytes: int) -> int:
    """Return how many tokens to process at once so that two tiles fit into `num_bytes`."""
    return _tile_shape(hidden_ND.dtype, num_rows, num_bytes)[0]


def local_stats(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    column_C: torch.Tensor,
    temperature: float,
    num_bytes: int,
) -> torch.Tensor:
    """Compute the `[4, C]` float64 statistics of the logits at the rows of `weight_VD`.

    The statistics are defined in `vocab.partial_softmax`.

    Args:
        hidden_CD: `[C, D]` hidden states.
        weight_VD: `[V, D]` rows of the output layer.
        column_C: `[C]` int64 row of `weight_VD` that belongs to the target, -1 for none.
        temperature: Divisor of the logits.
        num_bytes: Bound on the bytes of the tiles.
    """
    stats_4C = empty_stats(len(hidden_CD), hidden_CD.device)
    scratch = _TileScratch(hidden_CD, len(weight_VD), num_bytes)
    for rows in scratch.blocks:
        raw_CB, scratch_CB = scratch.tiles(len(hidden_CD), rows)
        matmul_accumulate(raw_CB, hidden_CD, weight_VD[rows].t(), fresh=True)
        block_4C = _block_stats(raw_CB, scratch_CB, column_C - rows.start, temperature)
        stats_4C = merge_stats(torch.stack([stats_4C, block_4C]))
    return stats_4C


def gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    column_N: torch.Tensor,
    coefficients: LogitGradCoefficients,
    temperature: float,
    num_bytes: int,
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Compute the gradients of the hidden states and of the rows of `weight_VD`.

    Args:
        hidden_ND: `[N, D]` hidden states.
        weight_VD: `[V, D]` rows of the output layer.
        column_N: `[N]` int64 row of `weight_VD` that belongs to the target, -1 for none.
        coefficients: Coefficients of the gradient of the raw logits.
        temperature: Divisor of the logits.
        num_bytes: Bound on the bytes of the tiles.
        grad_hidden_ND: `[N, D]` in the compute dtype, added to; None if not needed.
        grad_weight_VD: `[V, D]` in the weight's dtype, overwritten; None if not needed.
    """
    scratch = _TileScratch(hidden_ND, len(weight_VD), num_bytes)

    def tile_gradient(tokens: slice, rows: slice) -> torch.Tensor:
        raw_CB, scratch_CB = scratch.tiles(tokens.stop - tokens.start, rows)
        matmul_accumulate(raw_CB, hidden_ND[tokens], weight_VD[rows].t(), fresh=True)
        column_C = column_N[tokens] - rows.start
        return _tile_gradient(
            raw_CB, scratch_CB, column_C, coefficients.slice_tokens(tokens), temperature
        )

    accumulate_gradients(
        hidden_ND,
        weight_VD,
        tile_gradient,
        scratch.chunks,
        scratch.blocks,
        grad_hidden_ND,
        grad_weight_VD,
    )


class _TileScratch:
    """Memory of two tiles of logits, and the split of tokens and rows into tiles."""

    def __init__(self, hidden_ND: torch.Tensor, num_rows: int, num_bytes: int) -> None:
        step, width = _tile_shape(hidden_ND.dtype, num_rows, num_bytes)
        self.chunks = list(split_range(len(hidden_ND), step))
        self.blocks = list(split_range(num_rows, width))
        self._buffer = hidden_ND.new_empty(
            2, min(step, len(hidden_ND)) * width, dtype=compute_dtype(hidden_ND.dtype)
        )

    def tiles(self, num_tokens: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two `[C, B]` tiles; every call returns the same memory."""
        width = rows.stop - rows.start
        first, second = self._buffer[:, : num_tokens * width].unbind()
        return first.view(num_tokens, width), second.view(num_tokens, width)


def _tile_shape(dtype: torch.dtype, num_rows: int, num_bytes: int) -> tuple[int, int]:
    """Return how many tokens and rows a tile has, so that two tiles fit into `num_bytes`."""
    elements = max(1, num_bytes // (2 * compute_dtype(dtype).itemsize))
    width = max(1, min(num_rows, BLOCK_ROWS, math.isqrt(2 * elements)))
    return max(1, elements // width), width


def _locate_targets(column_C: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's `[C, 1]` column in a block, 0 if outside, and whether it is inside."""
    inside_C = (column_C >= 0) & (column_C < width)
    return (column_C * inside_C)[:, None], inside_C[:, None]


def _block_stats(
    raw_CB: torch.Tensor, scratch_CB: torch.Tensor, column_C: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the `[4, C]` float64 statistics of one tile; logits and scratch are overwritten."""
    index_C1, inside_C1 = _locate_targets(column_C, raw_CB.size(1))
    target_C = raw_CB.gather(1, index_C1).masked_fill_(~inside_C1, -torch.inf).squeeze(1)
    max_C = raw_CB.amax(dim=1)
    x_CB = _scale_by_temperature(raw_CB.sub_(max_C[:, None]), temperature)
    exp_CB = torch.exp(x_CB, out=scratch_CB)
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
    scratch_CB: torch.Tensor,
    column_C: torch.Tensor,
    coefficients: LogitGradCoefficients,
    temperature: float,
) -> torch.Tensor:
    """Turn the raw logits of a tile into their `[C, B]` gradient; the scratch is overwritten."""
    x_CB = _scale_by_temperature(raw_CB.sub_(coefficients.max_raw_logit_N[:, None]), temperature)
    if coefficients.entropy_coef_N is None:
        grad_CB = x_CB.exp_().mul_(-coefficients.prob_coef_N[:, None])
    else:
        exp_CB = torch.exp(x_CB, out=scratch_CB)
        x_CB.mul_(-coefficients.entropy_coef_N[:, None]).sub_(coefficients.prob_coef_N[:, None])
        grad_CB = x_CB.mul_(exp_CB)
    index_C1, inside_C1 = _locate_targets(column_C, raw_CB.size(1))
    return grad_CB.scatter_add_(1, index_C1, coefficients.target_coef_N[:, None] * inside_C1)


def _scale_by_temperature(x_CB: torch.Tensor, temperature: float) -> torch.Tensor:
    # The maximum is already subtracted, so the product loses at most the last digit.
    return x_CB if temperature == 1.0 else x_CB.mul_(1.0 / temperature)

"""Tiling of the vocabulary head, shared by its kernels.

A tile holds the logits of some tokens at some rows of the vocabulary; the tiles in memory are
bounded by a number of bytes. This module splits ranges and sums the gradients of tiles.

Shape suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block,
D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mega_agentrl.actor.matmul import matmul_accumulate

SCRATCH_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Default bound on the bytes of all tiles: a CPU's cache, or a small part of a GPU's memory."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, block statistics and gradient sums for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_scratch_bytes(device: torch.device) -> int:
    """Return the default bound on the bytes of all tiles, from `SCRATCH_BYTES`."""
    return SCRATCH_BYTES.get(device.type, SCRATCH_BYTES["cpu"])


def split_range(total: int, step: int) -> Iterator[slice]:
    """Yield slices of length `step` that cover range(total); the last may be shorter."""
    for start in range(0, total, step):
        yield slice(start, min(total, start + step))


def accumulate_gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    tile_gradient: Callable[[slice, slice], torch.Tensor],
    chunks: Sequence[slice],
    blocks: Sequence[slice],
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Add the gradient of the hidden states and set the gradient of the weight rows.

    The outer loop runs over blocks and the inner one over chunks, so that the gradient of a
    block is summed in the compute dtype and rounded once.

    Args:
        hidden_ND: `[N, D]` hidden states.
        weight_VD: `[V, D]` weight rows.
        tile_gradient: Maps token and row slices to the `[C, B]` gradient of the raw logits; the
            result is used before the next call.
        chunks: Slices that cover all tokens.
        blocks: Slices that cover all rows.
        grad_hidden_ND: `[N, D]` in the compute dtype, added to; None if not needed.
        grad_weight_VD: `[V, D]` in the weight's dtype, overwritten; None if not needed.
    """
    dtype = compute_dtype(hidden_ND.dtype)
    for rows in blocks:
        weight_BD = weight_VD[rows]
        grad_BD = None if grad_weight_VD is None else grad_weight_VD[rows]
        if grad_BD is not None and grad_BD.dtype != dtype:
            grad_BD = torch.empty_like(grad_BD, dtype=dtype)
        for tokens in chunks:
            grad_CB = tile_gradient(tokens, rows)
            if grad_hidden_ND is not None:
                matmul_accumulate(grad_hidden_ND[tokens], grad_CB, weight_BD)
            if grad_BD is not None:
                matmul_accumulate(grad_BD, grad_CB.t(), hidden_ND[tokens], fresh=tokens.start == 0)
        if grad_weight_VD is not None and grad_weight_VD.dtype != dtype:
            grad_weight_VD[rows] = grad_BD

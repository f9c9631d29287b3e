"""What the kernels of the vocabulary head share: how work is cut into tiles, products with a
wide result, and the sums over tiles that make the gradients from a tile's gradient.

A tile is the logits of some tokens at some rows of the vocabulary; only so many exist at once
as fit into a bound on bytes. This module makes no logits itself.

Suffixes: N tokens, C tokens of a chunk, V local vocabulary rows, B rows of a block, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

SCRATCH_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of logits, statistics of a block and sums of gradients for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def default_scratch_bytes(device: torch.device) -> int:
    """Bound on the bytes of tiles: a core's share of the cache, or little of a GPU's memory."""
    return SCRATCH_BYTES.get(device.type, SCRATCH_BYTES["cpu"])


def cut(total: int, step: int) -> Iterator[slice]:
    """Slices of `step` that cover range(total), the last one shorter."""
    for start in range(0, total, step):
        yield slice(start, min(total, start + step))


def accumulate(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, fresh: bool = False
) -> None:
    """out += left @ right, or out = left @ right if `fresh`, summed in out's wider type.

    A GPU multiplies narrow types as they are; a CPU widens the factors first.
    """
    beta = 0.0 if fresh else 1.0
    if left.is_cuda and left.dtype != out.dtype:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=beta, out=out)


def sum_gradients(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    tile_gradient: Callable[[slice, slice], torch.Tensor],
    chunks: Sequence[slice],
    blocks: Sequence[slice],
    grad_hidden_ND: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Add the hidden states' gradient through these columns, overwrite the rows' own.

    tile_gradient: (tokens, rows) -> [C, B] gradient of the raw logits there; used up before the
    next call. chunks, blocks: cover all tokens and rows. grad_hidden_ND: [N, D] in the type of
    computation. grad_weight_VD: [V, D] in the weight's type. None is not wanted. Blocks outside,
    chunks inside: a block's gradient is summed wide and rounded once.
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
                accumulate(grad_hidden_ND[tokens], grad_CB, weight_BD)
            if grad_BD is not None:
                accumulate(grad_BD, grad_CB.t(), hidden_ND[tokens], fresh=tokens.start == 0)
        if grad_weight_VD is not None and grad_weight_VD.dtype != dtype:
            grad_weight_VD[rows] = grad_BD

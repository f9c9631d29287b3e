"""Sums and means over unmasked positions.

A masked position never changes a result, whatever its value, NaN and infinity included; its
gradient is 0. Masks are bool or 0/1. Where nothing is unmasked the result is 0, not NaN.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.masked_scan import map_row_chunks, row_chunks


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum of `x` where `mask` is set, over all positions or along `dim`."""
    values = _zero_masked(x, mask)
    return values.sum() if dim is None else values.sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean of `x` where `mask` is set, over all positions or along `dim`."""
    total = masked_sum(x, mask, dim)
    on = mask.bool()
    count = on.sum() if dim is None else on.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) over all unmasked positions, 0 where masked.

    The variance is unbiased. A single unmasked position becomes 0.
    """
    mean, variance = masked_moments(x, mask)
    scale = torch.rsqrt(variance + eps)
    return masked_standardize(x, mask, mean, scale)


def masked_standardize(
    x: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return (x - mean) * scale where `mask` is set, 0 elsewhere; mean and scale are 0-d."""
    shift, factor = mean.to(x.dtype), scale.to(x.dtype)

    def rows(piece: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        return torch.where(on, (piece - shift) * factor, 0.0)

    return map_row_chunks(rows, x, mask.bool())


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 0-d float64 mean and unbiased variance of `x` where `mask` is set.

    The variance is computed in a second pass, without gradient; it is 0 for fewer than two
    positions.
    """
    _check_mask_shape(x, mask)
    count, total = x.new_zeros((), dtype=torch.float64), x.new_zeros((), dtype=torch.float64)
    parts = list(row_chunks(x.detach(), mask.bool()))
    for piece, on in parts:
        count += on.sum()
        total += torch.where(on, piece, 0.0).sum(dtype=torch.float64)
    mean = total / count.clamp(min=1)
    squares = torch.zeros_like(total)
    for piece, on in parts:
        squares += torch.where(on, piece - mean, 0.0).square().sum(dtype=torch.float64)
    return mean, squares / (count - 1).clamp(min=1)


def _zero_masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    _check_mask_shape(x, mask)
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def _check_mask_shape(x: torch.Tensor, mask: torch.Tensor) -> None:
    if x.shape != mask.shape:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected that of x, {tuple(x.shape)}"
        )

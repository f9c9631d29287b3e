"""Sums and means over unmasked positions.

A masked position never changes a result: its value may be anything, NaN and infinity
included, and its gradient is 0. Masks are bool or 0/1. Where nothing is unmasked the result
is 0, not NaN.
"""

from __future__ import annotations

import torch

from mega_agentrl.algo.scan import by_rows, row_parts


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of `x` where `mask` is set, over all positions or along `dim`."""
    kept = _kept(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of `x` where `mask` is set, over all positions or along `dim`; 0 where none is."""
    total = masked_sum(x, mask, dim)
    on = mask.bool()
    count = on.sum() if dim is None else on.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) over all unmasked positions, var unbiased; 0 where masked.

    A single unmasked position has no spread and becomes 0.
    """
    mean, variance = masked_moments(x, mask)
    scale = torch.rsqrt(variance + eps)
    return standardised(x, mask, mean, scale)


def standardised(
    x: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """(x - mean) * scale where `mask` is set, 0 elsewhere; mean and scale 0-d."""
    shift, factor = mean.to(x.dtype), scale.to(x.dtype)

    def rows(piece: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
        return torch.where(on, (piece - shift) * factor, 0.0)

    return by_rows(rows, x, mask.bool())


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """0-d float64 mean and unbiased variance of `x` where `mask` is set; 0 without a spread.

    Variance as the mean square distance from the mean, in a second pass, without gradient.
    """
    _check(x, mask)
    count, total = x.new_zeros((), dtype=torch.float64), x.new_zeros((), dtype=torch.float64)
    parts = list(row_parts(x.detach(), mask.bool()))
    for piece, on in parts:
        count += on.sum()
        total += torch.where(on, piece, 0.0).sum(dtype=torch.float64)
    mean = total / count.clamp(min=1)
    squares = torch.zeros_like(total)
    for piece, on in parts:
        squares += torch.where(on, piece - mean, 0.0).square().sum(dtype=torch.float64)
    return mean, squares / (count - 1).clamp(min=1)


def _kept(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    _check(x, mask)
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def _check(x: torch.Tensor, mask: torch.Tensor) -> None:
    if x.shape != mask.shape:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected that of x, {tuple(x.shape)}"
        )

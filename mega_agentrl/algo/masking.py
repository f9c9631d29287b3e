"""Sums and means over unmasked positions.

A masked position never changes a result: its value may be anything, NaN and infinity
included, and its gradient is 0. Masks are bool or 0/1. Where nothing is unmasked the result
is 0, not NaN.
"""

from __future__ import annotations

import torch


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
    on = mask.bool()
    centred = torch.where(on, x - masked_mean(x, mask), torch.zeros_like(x))
    variance = (centred * centred).sum() / (on.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + eps)


def _kept(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if x.shape != mask.shape:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected that of x, {tuple(x.shape)}"
        )
    return torch.where(mask.bool(), x, torch.zeros_like(x))

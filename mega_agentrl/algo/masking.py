"""Masked sums, means and log-ratios, shifts, turns, and chunks of rows.

A masked position never changes a result, even if its value is NaN or infinite, and its gradient is
0. Masks are bool or 0/1. Where nothing is unmasked the result is 0, not NaN.

Losses run in float32: half precision rounds away a log-ratio of 1e-3, so `algo` never subtracts
log-probs in it. float64 is kept, so that gradients can be checked against finite differences.

B trajectories, T response positions; R rows of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXPONENT_BOUND = 20.0
"""Largest absolute value of an exponent: ratios stay within e^-20 to e^20."""
ROWS_PER_CHUNK = 16
"""Rows that `row_chunks` yields at a time."""


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as float32, or unchanged if it is float64; integers and masks become float32."""
    return x if x.dtype == torch.float64 else x.float()


def zero_masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `x` where `mask` is set, 0 elsewhere."""
    _check_mask_shape(x, mask)
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def masked_log_ratio(
    logp_BT: torch.Tensor, other_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Return logp - other_logp, upcast, 0 where masked, [B, T]."""
    return zero_masked(upcast(logp_BT) - upcast(other_logp_BT), mask_BT)


def bounded_exp(exponent: torch.Tensor) -> torch.Tensor:
    """Return exp(clamp(exponent, -20, 20)), so that no ratio overflows."""
    return exponent.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def shift(x_RT: torch.Tensor, by: int) -> torch.Tensor:
    """Return the rows moved `by` positions to the right, or to the left if negative, [R, T].

    The positions that this leaves free are 0.
    """
    width = x_RT.shape[1]
    gap = min(abs(by), width)
    if by < 0:
        return torch.nn.functional.pad(x_RT[:, gap:], (0, gap))
    return torch.nn.functional.pad(x_RT[:, : width - gap], (gap, 0))


def number_turns(mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the number of each unmasked token's turn in its row, from 0, [B, T]; -1 where masked.

    A turn is a run of unmasked tokens.
    """
    mask_BT = mask_BT.bool()
    is_start_BT = mask_BT.clone()
    is_start_BT[:, 1:] &= ~mask_BT[:, :-1]
    return torch.where(mask_BT, is_start_BT.cumsum(1) - 1, -1)


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum of `x` where `mask` is set, over all positions or along `dim`."""
    values = zero_masked(x, mask)
    return values.sum() if dim is None else values.sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean of `x` where `mask` is set, over all positions or along `dim`."""
    total = masked_sum(x, mask, dim)
    mask = mask.bool()
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / count.clamp(min=1)


def masked_whiten(x: torch.Tensor, mask: torch.Tensor, *, eps: float = 1e-8) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) over all unmasked positions, 0 where masked.

    The variance is unbiased. A single unmasked position becomes 0.
    """
    mean, variance = masked_moments(x, mask)
    centre, factor = mean.to(x.dtype), torch.rsqrt(variance + eps).to(x.dtype)

    def whiten_rows(x_rows: torch.Tensor, mask_rows: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_rows, (x_rows - centre) * factor, 0.0)

    return map_row_chunks(whiten_rows, x, mask.bool())


def masked_moments(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the unbiased variance of `x` where `mask` is set, 0-d float64.

    The variance is computed in a second pass, without gradient; it is 0 for fewer than two
    positions.
    """
    _check_mask_shape(x, mask)
    count, total = x.new_zeros((), dtype=torch.float64), x.new_zeros((), dtype=torch.float64)
    chunks = list(row_chunks(x.detach(), mask.bool()))
    for x_rows, mask_rows in chunks:
        count += mask_rows.sum()
        total += torch.where(mask_rows, x_rows, 0.0).sum(dtype=torch.float64)
    mean = total / count.clamp(min=1)
    squares = torch.zeros_like(total)
    for x_rows, mask_rows in chunks:
        squares += torch.where(mask_rows, x_rows - mean, 0.0).square().sum(dtype=torch.float64)
    return mean, squares / (count - 1).clamp(min=1)


def map_row_chunks(function: Callable[..., torch.Tensor], *grids_BT: torch.Tensor) -> torch.Tensor:
    """Apply a function that treats rows independently to chunks of rows; return all its rows.

    Args:
        function: Maps one [R, T] chunk of each grid to a tensor with R rows.
        grids_BT: Tensors of B rows each.
    """
    return torch.cat([function(*chunk) for chunk in row_chunks(*grids_BT)])


def row_chunks(*tensors_B: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the tensors a few rows at a time, so that intermediate results stay in the cache."""
    return zip(*(torch.split(tensor_B, ROWS_PER_CHUNK) for tensor_B in tensors_B), strict=True)


def _check_mask_shape(x: torch.Tensor, mask: torch.Tensor) -> None:
    if x.shape != mask.shape:
        raise InputError("mask", tuple(mask.shape), f"the shape of x, {tuple(x.shape)}")

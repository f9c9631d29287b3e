"""Sums and matrix products whose bits do not depend on the order of the summation.

Floating-point addition rounds, so that a sum depends on how a kernel splits it: over rows of a
batch, threads, blocks of keys or ranks. Here the terms of a sum are rounded first, to multiples of
one power of two, few enough bits that every partial sum fits into the 53 bits of a float64. Then
no addition rounds, and every order and every split gives the same bits, on any device.

A product A B^T is split in the same way (Ozaki et al., Numerical Algorithms 59, 2012). Each row of
B becomes integers of 24 bits times a power of two. Each row of A becomes two such rows, the second
one for what the first one's rounding has left, with as many bits as K terms leave of the 53:

    A ~ s (A1 + 2^-b A2) 2^-b      b = 53 - 24 - ceil(log2 K)
    B ~ t B1 2^-24                 s, t: the powers of two above the largest element of the row

A1 B1^T and A2 B1^T are exact, so that they may be summed in parts, also over ranks that hold parts
of the K terms. Elements of A are rounded to 2^-2b of the largest of their row, at most 2^-30 up to
16,384 terms; a float32 product has errors of 2^-24 of each term.

Shape suffixes: M rows of A, N rows of B, K terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

_EXACT_BITS = 53
_RIGHT_BITS = 24
_EXPONENT_SHIFT = 52
_SMALLEST = 2.0**-500


@dataclass(frozen=True, slots=True)
class FixedPointRows:
    """Rows of the right factor of a product: `integers * 2^-24 * scale`."""

    integers: torch.Tensor
    """`[..., N, K]` float64, whole numbers up to 2^24."""
    scale: torch.Tensor
    """`[..., N, 1]` float64 powers of two."""

    @classmethod
    def from_rows(
        cls, rows: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> FixedPointRows:
        """Round `[..., N, K]` rows.

        Args:
            rows: The rows.
            group: Ranks that hold other parts of the same rows; None if they are whole.
        """
        rows = rows.double()
        scale = power_above(rows, group)
        return cls((rows * (2.0**_RIGHT_BITS / scale)).round_(), scale)


def power_above(rows: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the least power of two above the largest magnitude of each row, at least 2^-499.

    Args:
        rows: `[..., K]` float64.
        group: Ranks that hold other parts of the same rows; None if they are whole.

    Returns:
        `[..., 1]` float64.
    """
    largest = rows.abs().amax(dim=-1, keepdim=True)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # The reciprocal of the result, times a few powers of two, must be finite for a row of zeros.
    exponent = largest.clamp_min_(_SMALLEST).view(torch.int64) >> _EXPONENT_SHIFT
    return ((exponent + 1) << _EXPONENT_SHIFT).view(torch.float64)


def exact_sum(terms: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Return the sums of terms between -1 and 1 over the last dimension, `[..., 1]`.

    The terms are rounded to 2^-(53 - ceil(log2 num_terms)).

    Args:
        terms: `[..., K]` float64.
        num_terms: Bound on K, the same wherever the sum is computed.
    """
    unit = 2.0 ** (_bits_of(num_terms) - _EXACT_BITS)
    return (terms * (1.0 / unit)).round_().sum(dim=-1, keepdim=True) * unit


def exact_matmul(
    left: torch.Tensor,
    right: FixedPointRows,
    *,
    num_terms: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the `[..., M, N]` float64 product of `left` and the transposed rows of `right`.

    Args:
        left: `[..., M, K]`.
        right: `[..., N, K]` rows.
        num_terms: Bound on the K of all ranks together, the same wherever it is computed.
        group: Ranks that hold other parts of the K terms; None if this one has all.
    """
    bits = _EXACT_BITS - _RIGHT_BITS - _bits_of(num_terms)
    left = left.double()
    scale = power_above(left, group)
    scaled = left * (2.0**bits / scale)
    high = scaled.round()
    low = scaled.sub_(high).mul_(2.0**bits).round_()
    products = torch.stack([high, low]) @ right.integers.mT
    if group is not None:
        dist.all_reduce(products, group=group)
    total = products[0] + products[1] * 2.0**-bits
    return total * (scale * 2.0**-bits) * (right.scale * 2.0**-_RIGHT_BITS).mT


def _bits_of(num_terms: int) -> int:
    return math.ceil(math.log2(num_terms))

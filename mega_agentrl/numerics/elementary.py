"""Exponential, logarithm, sine and cosine from correctly rounded operations.

A library's vectorised kernels may give an element other bits than its scalar code, so that the
result depends on the element's place in the tensor. These functions use additions, products,
quotients and roundings only, which IEEE 754 defines to the last bit. They take and return float64,
with errors of a few units in the last place, and allocate about ten tensors of the input's size.
"""

from __future__ import annotations

import math

import torch

# Parts of ln 2 and pi / 2: the first ones have so few bits that their multiples are exact.
_LN2 = (0.693147180369123816490, 1.90821492927058770002e-10)
_HALF_PI = (1.57079632673412561417, 6.07710050650619224932e-11)
_EXPONENT_SHIFT, _EXPONENT_BIAS = 52, 1023
_MANTISSA_MASK = (1 << _EXPONENT_SHIFT) - 1
_MAX_EXPONENT = 700.0


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return e^x; x is clamped to [-700, 700]."""
    x = x.clamp(-_MAX_EXPONENT, _MAX_EXPONENT)
    power = (x * (1.0 / math.log(2.0))).round_()
    rest = (x - power * _LN2[0]).sub_(power * _LN2[1])
    series = torch.full_like(rest, 1.0 / math.factorial(12))
    for degree in range(11, -1, -1):
        series.mul_(rest).add_(1.0 / math.factorial(degree))
    bits = (power.to(torch.int64) + _EXPONENT_BIAS) << _EXPONENT_SHIFT
    return series.mul_(bits.view(torch.float64))


def log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of normal numbers x > 0; NaN for infinities and NaN."""
    bits = x.contiguous().view(torch.int64)
    mantissa = ((bits & _MANTISSA_MASK) | (_EXPONENT_BIAS << _EXPONENT_SHIFT)).view(torch.float64)
    is_large = mantissa > math.sqrt(2.0)
    mantissa = torch.where(is_large, mantissa * 0.5, mantissa)
    power = ((bits >> _EXPONENT_SHIFT) - _EXPONENT_BIAS + is_large).double()
    # log m = 2 atanh((m - 1) / (m + 1))
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(ratio, 1.0 / 21)
    for degree in range(19, 0, -2):
        series.mul_(square).add_(1.0 / degree)
    not_finite = x - x  # 0, or NaN for infinities and NaN, whose bits mean nothing above
    return power * _LN2[0] + (power * _LN2[1] + 2.0 * (ratio * series)) + not_finite


def sin_cos(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sine and cosine of x in radians, for magnitudes up to a million."""
    turn = (x * (2.0 / math.pi)).round_()
    rest = (x - turn * _HALF_PI[0]).sub_(turn * _HALF_PI[1])
    square = rest * rest
    sine, cosine = torch.zeros_like(rest), torch.zeros_like(rest)
    for term in range(8, -1, -1):
        numerator = -1.0 if term % 2 else 1.0
        sine.mul_(square).add_(numerator / math.factorial(2 * term + 1))
        cosine.mul_(square).add_(numerator / math.factorial(2 * term))
    sine.mul_(rest)
    quadrant = turn.to(torch.int64) & 3
    is_swapped, is_negative = (quadrant & 1).bool(), quadrant >= 2
    sign = torch.where(is_negative, -1.0, 1.0).double()
    return (
        torch.where(is_swapped, cosine, sine) * sign,
        torch.where(is_swapped, -sine, cosine) * sign,
    )

"""The inner loop of copying with a digest, compiled: every word is read once.

Machine code by numba, for a CPU; made when it is first asked for, in about half a second.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def copy_and_weigh(
    to_RW: torch.Tensor, word_RW: torch.Tensor, factor_W: np.ndarray, factor_2R: np.ndarray
) -> np.ndarray:
    """Copy rows of words and return [2] int32, modulo 2^32:

        D_k = sum_r factor_kr * sum_w factor_w * word_rw

    to_RW, word_RW: [R, W] int32 on a CPU, rows of any stride, words side by side.
    factor_W, factor_2R: int32, rows contiguous.
    """
    digest = np.empty(2, dtype=np.int32)
    kernel()(
        _flat(to_RW), to_RW.stride(0), _flat(word_RW), word_RW.stride(0),
        factor_W, factor_2R[0], factor_2R[1], digest,
    )  # fmt: skip
    return digest


def _flat(matrix_RW: torch.Tensor) -> np.ndarray:
    """The memory from the first word to the last: only one dim lets the compiler vectorise."""
    num_rows, num_words = matrix_RW.shape
    length = (num_rows - 1) * matrix_RW.stride(0) + num_words
    flat: np.ndarray = matrix_RW.as_strided((length,), (1,)).numpy()
    return flat


@cache
def kernel() -> Callable[..., None]:
    """Compiles it."""
    import numba

    line, number = numba.int32[::1], numba.int64
    signature = numba.void(line, number, line, number, line, line, line, line)
    compiled: Any = numba.njit([signature], nogil=True)(_copy_and_weigh)
    return compiled  # type: ignore[no-any-return]


def _copy_and_weigh(
    to: np.ndarray,
    to_stride: int,
    words: np.ndarray,
    stride: int,
    factors: np.ndarray,
    row_factors_0: np.ndarray,
    row_factors_1: np.ndarray,
    digest: np.ndarray,
) -> None:
    num_words = len(factors)
    first = second = np.int32(0)
    for row in range(len(row_factors_0)):
        target = to[row * to_stride : row * to_stride + num_words]
        source = words[row * stride : row * stride + num_words]
        total = np.int32(0)
        for column in range(num_words):
            word = source[column]
            target[column] = word
            total += word * factors[column]
        first += row_factors_0[row] * total
        second += row_factors_1[row] * total
    digest[0] = first
    digest[1] = second

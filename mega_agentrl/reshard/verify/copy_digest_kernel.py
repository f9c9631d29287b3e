"""Compiled inner loop that copies words and computes their digest in one pass.

numba compiles the loop to CPU machine code on first use, which takes about half a second. It is
called with addresses: a model has thousands of small slices, for which creating arrays would take
longer than copying them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


class CopyDigestKernel:
    """Copies rows of words and adds to two sums, modulo 2^32, with one set of factors.

        D_k += sum_r factor_kr * sum_w factor_w * word_rw

    Args:
        factor_W: `[W]` int32 factors of the words of a row.
        factor_2R: `[2, R]` int32 factors of the rows.
    """

    def __init__(self, factor_W: np.ndarray, factor_2R: np.ndarray) -> None:
        self._factors = [np.ascontiguousarray(one) for one in (factor_W, *factor_2R)]
        assert all(one.dtype == np.int32 for one in self._factors), "factors are int32"
        self._sizes = len(factor_W), factor_2R.shape[1]
        self._addresses = [one.ctypes.data for one in self._factors]
        self._call = compile_kernel()

    def copy(self, to: int, to_stride: int, words: int, stride: int, sums: int) -> None:
        """Copy `[R, W]` words and add their digest to `sums`. Nothing is checked.

        Args:
            to: Address of the target words in CPU memory.
            to_stride: Words from one target row to the next.
            words: Address of the source words in CPU memory.
            stride: Words from one source row to the next.
            sums: Address of the two 32-bit sums.
        """
        self._call(to, to_stride, words, stride, *self._sizes, *self._addresses, sums)


@cache
def compile_kernel() -> Callable[..., None]:
    """Compile the loop; sizes and factors come between the arguments of `CopyDigestKernel.copy`."""
    from numba import carray, cfunc, int32, int64, types, void

    line = types.CPointer(int32)

    @cfunc(void(line, int64, line, int64, int64, int64, line, line, line, line))  # type: ignore[untyped-decorator]
    def copy_with_digest(
        to_at: Any,
        to_stride: int,
        words_at: Any,
        stride: int,
        num_words: int,
        num_rows: int,
        factors_at: Any,
        rows_0_at: Any,
        rows_1_at: Any,
        sums_at: Any,
    ) -> None:
        # Arrays have one dim, because the compiler vectorizes no others.
        to = carray(to_at, ((num_rows - 1) * to_stride + num_words,))
        words = carray(words_at, ((num_rows - 1) * stride + num_words,))
        factors = carray(factors_at, (num_words,))
        row_factors_0 = carray(rows_0_at, (num_rows,))
        row_factors_1 = carray(rows_1_at, (num_rows,))
        first = second = np.int32(0)
        for row in range(num_rows):
            target = to[row * to_stride : row * to_stride + num_words]
            source = words[row * stride : row * stride + num_words]
            total = np.int32(0)
            for column in range(num_words):
                word = source[column]
                target[column] = word
                total += word * factors[column]
            first += row_factors_0[row] * total
            second += row_factors_1[row] * total
        sums = carray(sums_at, (2,))
        sums[0] += first
        sums[1] += second

    at, number = ctypes.c_void_p, ctypes.c_int64
    call = ctypes.CFUNCTYPE(None, at, number, at, number, number, number, at, at, at, at)
    function = call(copy_with_digest.address)
    # The machine code is freed with this object.
    function.code = copy_with_digest  # type: ignore[attr-defined]
    return function

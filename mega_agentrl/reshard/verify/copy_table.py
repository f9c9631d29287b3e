"""Copies many matrices between tensors and computes their digests, in one call and one pass.

A `CopyTable` is made once and then used for every update: only the addresses of its tensors change.
On a CPU its loop is compiled by numba, on first use, which takes about a second. On a GPU it is a
Triton kernel (`triton_copy`); without Triton there is no table, and callers use torch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mega_agentrl.reshard.verify.factors import column_factors, row_factors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_TARGET = -1


class MatrixCopy(NamedTuple):
    """A row of a `CopyTable`: a matrix to copy, and the digest to which its digest is added.

    Elements of a row are adjacent in both places. Offsets and strides count elements.
    """

    item_bytes: int
    """Bytes per element: 2 or 4."""
    source: int
    """Index of the tensor to copy from."""
    source_offset: int
    """First element."""
    source_stride: int
    """Elements from one row to the next."""
    target: int
    """Index of the tensor to copy to; `NO_TARGET` to compute the digest only, on a GPU."""
    target_offset: int
    target_stride: int
    num_rows: int
    num_columns: int
    first_row: int
    """Position of the first element in the tensor whose digest is computed."""
    first_column: int
    digest: int
    """Index of the digest."""


class CopyTable:
    """Matrices that are copied together."""

    def __init__(self, copies: Sequence[MatrixCopy]) -> None:
        self.copies = np.array(copies, dtype=np.int64).reshape(-1, len(MatrixCopy._fields))
        """`[copies, fields of MatrixCopy]`."""
        self.max_numel = max((copy.num_rows * copy.num_columns for copy in copies), default=0)
        """Elements of the largest matrix."""
        self.num_rows = max((copy.first_row + copy.num_rows for copy in copies), default=0)
        """Rows that need factors."""
        self.num_columns = max((copy.first_column + copy.num_columns for copy in copies), default=0)
        """Columns that need factors."""
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Return `copies` on a device, where it stays."""
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(self.copies).to(device)
        return self._on_device[device]

    def run(self, tensors: Sequence[torch.Tensor], sum_D2: torch.Tensor) -> None:
        """Copy all matrices and add their digests, modulo 2^32. Nothing is checked.

        Args:
            tensors: Tensors on one device, by their indices in the table; dtypes do not matter.
            sum_D2: `[digests, 2]` int32 on the same device.
        """
        if sum_D2.is_cuda:
            # Imported here because triton is not installed on machines without a GPU.
            from mega_agentrl.reshard.verify import triton_copy

            triton_copy.run_table(self, tensors, sum_D2)
            return
        call = compile_kernel()
        address_N = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        column_factor_C = column_factors(self.num_columns, sum_D2.device)
        row_factor_2R = row_factors(self.num_rows, sum_D2.device)
        call(
            self.copies.ctypes.data,
            len(self.copies),
            *[address_N.ctypes.data] * 3,
            column_factor_C.data_ptr(),
            row_factor_2R.data_ptr(),
            row_factor_2R.shape[1],
            sum_D2.data_ptr(),
        )


def supports_tables(device: torch.device) -> bool:
    """Return whether `CopyTable.run` works for tensors on a device."""
    return device.type == "cpu" or (device.type == "cuda" and _has_triton())


def prepare_kernel() -> None:
    """Compile or load the kernel for the device of this process, which takes up to seconds."""
    if not torch.cuda.is_available():
        compile_kernel()
    elif _has_triton():
        device = torch.device("cuda", torch.cuda.current_device())
        single_copy = MatrixCopy(4, 0, 0, 1, NO_TARGET, 0, 0, 1, 1, 0, 0, 0)
        sum_D2 = torch.zeros(1, 2, dtype=torch.int32, device=device)
        CopyTable([single_copy]).run([torch.zeros(1, device=device)], sum_D2)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def compile_kernel() -> Callable[..., None]:
    """Compile the loop for CPUs, which `CopyTable.run` calls.

    Its arguments contain the addresses of the tensors three times: as numbers, and as pointers to
    words and to 16-bit elements.
    """
    from numba import carray, cfunc, int16, int32, int64, types, void

    word, half, number = map(types.CPointer, (int32, int16, int64))
    pointers = (types.CPointer(word), types.CPointer(half))
    num_fields = len(MatrixCopy._fields)
    copy_words, copy_halves = _compile_loops()

    @cfunc(void(number, int64, number, *pointers, word, word, int64, word))  # type: ignore[untyped-decorator]
    def copy_with_digests(
        copies_at: Any,
        num_copies: Any,
        addresses: Any,
        words_at: Any,
        halves_at: Any,
        column_factors_at: Any,
        row_factors_at: Any,
        num_row_factors: Any,
        sums_at: Any,
    ) -> None:
        copies = carray(copies_at, (num_copies, num_fields))
        for index in range(num_copies):
            copy = copies[index]
            item_bytes, source, target = copy[0], copy[1], copy[4]
            offset, stride, to_offset, to_stride = copy[2], copy[3], copy[5], copy[6]
            num_rows, num_columns, first_row, first_column = copy[7], copy[8], copy[9], copy[10]
            size, to_size = (num_rows - 1) * stride, (num_rows - 1) * to_stride
            rows_0 = carray(row_factors_at, (first_row + num_rows,))[first_row:]
            rows_1 = carray(row_factors_at, (num_row_factors + first_row + num_rows,))
            rows_1 = rows_1[num_row_factors + first_row :]
            columns = carray(column_factors_at, (first_column + num_columns,))
            odd = offset | stride | to_offset | to_stride | num_columns | first_column
            misaligned = (addresses[source] | addresses[target]) & 3
            if item_bytes == 2 and ((odd & 1) or misaligned):
                halves = carray(halves_at[source], (offset + size + num_columns,))[offset:]
                to_halves = carray(halves_at[target], (to_offset + to_size + num_columns,))
                first, second = copy_halves(
                    to_halves[to_offset:], to_stride, halves, stride, num_columns,
                    columns[first_column >> 1 :], first_column & 1, rows_0, rows_1,
                )  # fmt: skip
            else:
                shift = 1 if item_bytes == 2 else 0
                num_words = num_columns >> shift
                offset, stride, size = offset >> shift, stride >> shift, size >> shift
                to_offset, to_stride = to_offset >> shift, to_stride >> shift
                to_size = to_size >> shift
                words = carray(words_at[source], (offset + size + num_words,))[offset:]
                to_words = carray(words_at[target], (to_offset + to_size + num_words,))
                first, second = copy_words(
                    to_words[to_offset:], to_stride, words, stride, num_words,
                    columns[first_column >> shift :], rows_0, rows_1,
                )  # fmt: skip
            sums_at[2 * copy[11]] += first
            sums_at[2 * copy[11] + 1] += second

    ptr, count = ctypes.c_void_p, ctypes.c_int64
    call = ctypes.CFUNCTYPE(None, ptr, count, ptr, ptr, ptr, ptr, ptr, count, ptr)
    function = call(copy_with_digests.address)
    # The machine code is freed with this object.
    function.code = copy_with_digests  # type: ignore[attr-defined]
    return function


def _compile_loops() -> tuple[Any, Any]:
    """Return functions that copy rows of words, or of 16-bit elements, and return two sums."""
    from numba import njit

    @njit  # type: ignore[untyped-decorator]
    def copy_words(
        to: Any,
        to_stride: Any,
        words: Any,
        stride: Any,
        num_words: Any,
        column_factors: Any,
        row_factors_0: Any,
        row_factors_1: Any,
    ) -> Any:
        first = second = np.int32(0)
        for row in range(len(row_factors_0)):
            # Slices have one dim, because the compiler vectorizes no others.
            target = to[row * to_stride : row * to_stride + num_words]
            source = words[row * stride : row * stride + num_words]
            total = np.int32(0)
            for column in range(num_words):
                word = source[column]
                target[column] = word
                total += word * column_factors[column]
            first += row_factors_0[row] * total
            second += row_factors_1[row] * total
        return first, second

    @njit  # type: ignore[untyped-decorator]
    def copy_halves(
        to: Any,
        to_stride: Any,
        halves: Any,
        stride: Any,
        num_columns: Any,
        column_factors: Any,
        odd: Any,
        row_factors_0: Any,
        row_factors_1: Any,
    ) -> Any:
        first = second = np.int32(0)
        for row in range(len(row_factors_0)):
            target = to[row * to_stride : row * to_stride + num_columns]
            source = halves[row * stride : row * stride + num_columns]
            total = np.int32(0)
            for column in range(num_columns):
                half = source[column]
                target[column] = half
                position = column + odd
                total += ((half & 0xFFFF) << (16 * (position & 1))) * column_factors[position >> 1]
            first += row_factors_0[row] * total
            second += row_factors_1[row] * total
        return first, second

    return copy_words, copy_halves

"""A checksum of a rectangle of a tensor that is the sum of the checksums of its parts.

Every element is read as the bits of the dtype it is sent in and weighted by its position in the
whole tensor, row r and column c:

    S_r = sum_c f_c * w_rc          D_k = sum_r a_kr * S_r,  k = 1, 2          mod 2^32

The digest (D_1, D_2) of a rectangle is therefore the sum of the digests of any parts it is divided
into. A rollout rank sums over what it has received and trainer ranks over what they hold, each in
one pass, and neither needs to know how the other is sharded. Rows are all dims but the last; a
vector is one row. Words w are 32 bits: a float32, or two 16-bit elements, of which the one in the
odd column is the high half.

All factors are odd, so a change within one word is always detected. Moved or exchanged rows and
columns are detected because the factors are unrelated (SplitMix64 of the position). The checksum
detects accidents, not attacks.

numba compiles the inner loop, which copies words and computes their digest in one pass, on first
use; that takes about half a second. The loop is called with addresses: a model has thousands of
small slices, for which creating arrays would take longer than copying them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mega_agentrl.reshard.layout import Rect


class CopyDigestKernel:
    """Copies rows of words and adds to two sums, modulo 2^32, with one set of factors.

        D_k += sum_r factor_kr * sum_w factor_w * word_rw

    Args:
        factor_W: `[W]` int32 factors of the words of a row.
        factor_2R: `[2, R]` int32 factors of the rows.
    """

    def __init__(self, factor_W: np.ndarray, factor_2R: np.ndarray) -> None:
        self._factors = [np.ascontiguousarray(factor) for factor in (factor_W, *factor_2R)]
        assert all(factor.dtype == np.int32 for factor in self._factors), "factors are int32"
        self._sizes = len(factor_W), factor_2R.shape[1]
        self._addresses = [factor.ctypes.data for factor in self._factors]
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
    """Compile the loop.

    Its arguments are those of `CopyDigestKernel.copy` with the sizes and the addresses of the
    factors inserted before `sums`.
    """
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


_COLUMN_FACTORS, _ROW_FACTORS = (0,), (1, 2)
"""Kinds of factors: one for columns, two for rows."""
_INITIAL_TABLE_SIZE = 4096
_CHUNK_BYTES = {"cpu": 2**18, "cuda": 2**26}
"""Bytes of products per pass: few enough for the CPU cache, enough to occupy a GPU."""

_factor_tables: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def compute_digests(items: Iterable[tuple[torch.Tensor, Rect]]) -> np.ndarray:
    """Return `[n, 2]` uint32, the digest of each rectangle.

    Args:
        items: Values in the dtype they are sent in (16 or 32 bits), shaped like their
            rectangle, and the rectangle in the whole tensor.

    Raises:
        ValueError: For other dtypes and shapes.
    """
    digests = [_digest_of_rect(values, rect) for values, rect in items]
    if not digests:
        return np.zeros((0, 2), dtype=np.uint32)
    return torch.stack(digests).cpu().numpy().view(np.uint32)


def _digest_of_rect(values: torch.Tensor, rect: Rect) -> torch.Tensor:
    """Return `[2]` int32 on the device of the values."""
    if tuple(values.shape) != rect.shape or values.element_size() not in (2, 4):
        raise ValueError(
            f"digest: values {tuple(values.shape)} of {values.dtype} for {rect}, expected its "
            "shape and a type of 16 or 32 bits"
        )
    if len(rect.start) > 2:
        raise ValueError(f"digest: {rect} has {len(rect.start)} dims, expected at most 2")
    start = (0,) * (2 - len(rect.start)) + rect.start
    value_RC = values.reshape((1,) * (2 - values.ndim) + tuple(values.shape))
    num_rows = value_RC.shape[0]
    word_RC, factor_C = _words_and_factors(value_RC, start[1])
    sum_R = _weighted_row_sums(word_RC, factor_C)
    last = start[0] + num_rows
    factor_2R = _factor_table(_ROW_FACTORS, last, values.device)[:, start[0] : last]
    return (sum_R * factor_2R).sum(1, dtype=torch.int32)


class CopyWithDigest:
    """Copies the values of one rectangle and adds their digest, in one pass, any number of times.

    Everything that depends only on the rectangle is computed once.

    Args:
        rect: Position of the values in the whole tensor.
    """

    def __init__(self, rect: Rect) -> None:
        self._num_columns = rect.shape[-1]
        self._num_rows = rect.numel // self._num_columns
        self._start = (0,) * (2 - len(rect.start)) + rect.start
        self._kernels: dict[int, CopyDigestKernel | None] = {}

    def copy(self, to: torch.Tensor, values: torch.Tensor, sums: int) -> bool:
        """Copy `values` and add their digest to the two words at address `sums`.

        `to` and `values` have the rectangle's shape except for dims of size one. Returns False
        without copying if the kernel does not apply: for memory that is not on a CPU, another
        dtype, or rows that do not consist of whole words.
        """
        if to.dtype != values.dtype or not (to.is_cpu and values.is_cpu):
            return False
        size = to.element_size()
        if size not in self._kernels:
            self._kernels[size] = self._make_kernel(size)
        kernel = self._kernels[size]
        to_stride, stride = self._row_stride(to), self._row_stride(values)
        to_at, at = to.data_ptr(), values.data_ptr()
        if kernel is None or to_stride is None or stride is None:
            return False
        if size == 2:
            if to_stride % 2 or stride % 2 or to_at % 4 or at % 4:
                return False
            to_stride, stride = to_stride // 2, stride // 2
        kernel.copy(to_at, to_stride, at, stride, sums)
        return True

    def _make_kernel(self, size: int) -> CopyDigestKernel | None:
        first_row, first_column = self._start
        if size not in (2, 4) or (size == 2 and (first_column % 2 or self._num_columns % 2)):
            return None
        first, last = (c * size // 4 for c in (first_column, first_column + self._num_columns))
        end = first_row + self._num_rows
        cpu = torch.device("cpu")
        factor_C = _factor_table(_COLUMN_FACTORS, last, cpu)[0].numpy()[first:last]
        return CopyDigestKernel(
            factor_C, _factor_table(_ROW_FACTORS, end, cpu).numpy()[:, first_row:end]
        )

    def _row_stride(self, values: torch.Tensor) -> int | None:
        """Return the elements from one row to the next, or None if a row is not contiguous."""
        if values.is_contiguous():
            return self._num_columns
        matrix_RC = values.view(self._num_rows, self._num_columns)
        return matrix_RC.stride(0) if matrix_RC.stride(1) == 1 else None


def _words_and_factors(value_RC: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and the factors of their columns; `first` is the column of the first element."""
    num_columns = value_RC.shape[1]
    if value_RC.element_size() == 4:
        factor_C = _factor_table(_COLUMN_FACTORS, first + num_columns, value_RC.device)[0]
        return value_RC.view(torch.int32), factor_C[first : first + num_columns]
    last = first + num_columns
    factor_C = _factor_table(_COLUMN_FACTORS, (last + 1) // 2, value_RC.device)[0]
    if _can_view_as_words(value_RC, first):
        return value_RC.view(torch.int32), factor_C[first // 2 : last // 2]
    # Element by element: the low half is unsigned, the high half is shifted up.
    bits_RC = value_RC.view(torch.int16).to(torch.int32) & 0xFFFF
    column_C = torch.arange(first, last, device=value_RC.device)
    factor_C = factor_C[column_C // 2] << (16 * (column_C % 2)).to(torch.int32)
    return bits_RC, factor_C


def _can_view_as_words(value_RC: torch.Tensor, first: int) -> bool:
    """Return whether pairs of elements can be read in place as words."""
    even = (first, value_RC.shape[1], value_RC.storage_offset())
    rows = value_RC.stride(0) if value_RC.shape[0] > 1 else 0
    return value_RC.stride(1) == 1 and not any(number % 2 for number in (*even, rows))


def _weighted_row_sums(word_RC: torch.Tensor, factor_C: torch.Tensor) -> torch.Tensor:
    """Return `[R]` int32, the sums over columns modulo 2^32."""
    if word_RC.device.type == "cpu" and word_RC.stride(1) == 1:
        # torch.mv is not vectorized for integers and has a third of the speed.
        return torch.mm(factor_C[None], word_RC.t())[0]
    limit = _CHUNK_BYTES[word_RC.device.type] // (4 * word_RC.shape[1])
    parts = torch.split(word_RC, max(1, limit))
    return torch.cat([(part * factor_C).sum(1, dtype=torch.int32) for part in parts])


def _factor_table(kinds: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Return `[kinds, at least size]` int32 factors from a cache that grows by doubling."""
    table = _factor_tables.get((kinds, device))
    if table is None or table.shape[1] < size:
        length = max(_INITIAL_TABLE_SIZE, 1 << (size - 1).bit_length())
        factors = torch.from_numpy(np.stack([_make_factors(kind, length) for kind in kinds]))
        table = _factor_tables[kinds, device] = factors.to(device)
    return table


def _make_factors(kind: int, length: int) -> np.ndarray:
    """Return `[length]` int32, odd: upper halves of SplitMix64 (Steele, Lea and Flood, 2014)."""
    position = np.arange(1, length + 1, dtype=np.uint64) + (np.uint64(kind) << np.uint64(40))
    mixed = position * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    upper = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
    return (upper | np.uint32(1)).view(np.int32)

"""A checksum of a rectangle of a tensor that can be summed from any cut of it.

Every element is read as the bits of its wire type and weighed by where it stands in the whole
tensor, row r and column c:

    S_r = sum_c f_c * w_rc          D_k = sum_r a_kr * S_r,  k = 1, 2          mod 2^32

so the digest (D_1, D_2) of a rectangle is the sum of the digests of any pieces it is cut into.
That makes it a proof: a rollout rank sums over what it has received, trainer ranks over what
they hold, each in one pass, and neither needs to know how the other is cut. Rows are all dims
but the last; a vector is one row. Words w are 32 bits: a float32, or two 16-bit elements, of
which the one in the odd column is the high half.

All factors are odd, so a change within one word always shows; moved or exchanged rows and
columns show because the factors are unrelated (SplitMix64 of the position). It finds accidents,
not attacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.reshard.weigh import Weigher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mega_agentrl.reshard.layout import Rect

_COLUMN, _ROW = (0,), (1, 2)
"""Kinds of factors: of columns, and both of rows."""
_FIRST_SIZE = 4096
_CHUNK_BYTES = {"cpu": 2**18, "cuda": 2**26}
"""Products of a pass: what stays in the cache, and on a GPU enough to fill it."""

_tables: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}


def digests(items: Iterable[tuple[torch.Tensor, Rect]]) -> np.ndarray:
    """[n, 2] uint32, the digest of each rectangle.

    items: values shaped like their rectangle, in the type they travel in (16 or 32 bits), and
    where they stand in the whole tensor. Raises `ValueError` for other types and shapes.
    """
    found = [_digest(values, rect) for values, rect in items]
    if not found:
        return np.zeros((0, 2), dtype=np.uint32)
    return torch.stack(found).cpu().numpy().view(np.uint32)


def _digest(values: torch.Tensor, rect: Rect) -> torch.Tensor:
    """[2] int32 on the device of the values."""
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
    word_RC, factor_C = _words(value_RC, start[1])
    sum_R = _weighed_sums(word_RC, factor_C)
    last = start[0] + num_rows
    factor_2R = _table(_ROW, last, values.device)[:, start[0] : last]
    return (sum_R * factor_2R).sum(1, dtype=torch.int32)


class DigestingCopy:
    """Copies the values of one rectangle and adds their digest, in one pass, as often as wanted.

    All that depends on the rectangle alone is worked out once.
    """

    def __init__(self, rect: Rect) -> None:
        """rect: where the values stand in the whole tensor."""
        self._num_columns = rect.shape[-1]
        self._num_rows = rect.numel // self._num_columns
        self._start = (0,) * (2 - len(rect.start)) + rect.start
        self._weighers: dict[int, Weigher | None] = {}

    def copy(self, to: torch.Tensor, values: torch.Tensor, sums: int) -> bool:
        """Copy and add to the two words at address `sums`.

        to, values: of the rectangle's shape, dims of one element aside. False, and nothing
        copied, where that is not to be had: not in the memory of a CPU, another type, rows of
        odd halves.
        """
        if to.dtype != values.dtype or not (to.is_cpu and values.is_cpu):
            return False
        size = to.element_size()
        if size not in self._weighers:
            self._weighers[size] = self._weigher(size)
        weigher = self._weighers[size]
        to_stride, stride = self._row_stride(to), self._row_stride(values)
        to_at, at = to.data_ptr(), values.data_ptr()
        if weigher is None or to_stride is None or stride is None:
            return False
        if size == 2:
            if to_stride % 2 or stride % 2 or to_at % 4 or at % 4:
                return False
            to_stride, stride = to_stride // 2, stride // 2
        weigher.copy(to_at, to_stride, at, stride, sums)
        return True

    def _weigher(self, size: int) -> Weigher | None:
        first_row, first_column = self._start
        if size not in (2, 4) or (size == 2 and (first_column % 2 or self._num_columns % 2)):
            return None
        first, last = (c * size // 4 for c in (first_column, first_column + self._num_columns))
        end = first_row + self._num_rows
        cpu = torch.device("cpu")
        factor_C = _table(_COLUMN, last, cpu)[0].numpy()[first:last]
        return Weigher(factor_C, _table(_ROW, end, cpu).numpy()[:, first_row:end])

    def _row_stride(self, values: torch.Tensor) -> int | None:
        """Elements from one row to the next; None where those of a row are not side by side."""
        if values.is_contiguous():
            return self._num_columns
        matrix_RC = values.view(self._num_rows, self._num_columns)
        return matrix_RC.stride(0) if matrix_RC.stride(1) == 1 else None


def _words(value_RC: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and the factors of their columns; first: column of the first element."""
    num_columns = value_RC.shape[1]
    if value_RC.element_size() == 4:
        factor_C = _table(_COLUMN, first + num_columns, value_RC.device)[0]
        return value_RC.view(torch.int32), factor_C[first : first + num_columns]
    last = first + num_columns
    factor_C = _table(_COLUMN, (last + 1) // 2, value_RC.device)[0]
    if _in_pairs(value_RC, first):
        return value_RC.view(torch.int32), factor_C[first // 2 : last // 2]
    # Element by element: the low half counts unsigned, the high half is moved up.
    bits_RC = value_RC.view(torch.int16).to(torch.int32) & 0xFFFF
    column_C = torch.arange(first, last, device=value_RC.device)
    factor_C = factor_C[column_C // 2] << (16 * (column_C % 2)).to(torch.int32)
    return bits_RC, factor_C


def _in_pairs(value_RC: torch.Tensor, first: int) -> bool:
    """Whether words of two elements can be read where they lie."""
    even = (first, value_RC.shape[1], value_RC.storage_offset())
    rows = value_RC.stride(0) if value_RC.shape[0] > 1 else 0
    return value_RC.stride(1) == 1 and not any(number % 2 for number in (*even, rows))


def _weighed_sums(word_RC: torch.Tensor, factor_C: torch.Tensor) -> torch.Tensor:
    """[R] int32: sum over columns, modulo 2^32."""
    if word_RC.device.type == "cpu" and word_RC.stride(1) == 1:
        # Not torch.mv, which has no vector instructions for integers: a third of the speed.
        return torch.mm(factor_C[None], word_RC.t())[0]
    limit = _CHUNK_BYTES[word_RC.device.type] // (4 * word_RC.shape[1])
    parts = torch.split(word_RC, max(1, limit))
    return torch.cat([(part * factor_C).sum(1, dtype=torch.int32) for part in parts])


def _table(kinds: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """[kinds, at least size] int32 factors; grows by doubling."""
    table = _tables.get((kinds, device))
    if table is None or table.shape[1] < size:
        length = max(_FIRST_SIZE, 1 << (size - 1).bit_length())
        made = torch.from_numpy(np.stack([_factors(kind, length) for kind in kinds]))
        table = _tables[kinds, device] = made.to(device)
    return table


def _factors(kind: int, length: int) -> np.ndarray:
    """[length] int32, odd: the upper halves of SplitMix64 (Steele, Lea and Flood, 2014)."""
    position = np.arange(1, length + 1, dtype=np.uint64) + (np.uint64(kind) << np.uint64(40))
    mixed = position * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    upper = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
    return (upper | np.uint32(1)).view(np.int32)

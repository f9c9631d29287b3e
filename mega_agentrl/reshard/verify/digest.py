"""A checksum of a rectangle of a tensor that is the sum of the checksums of its parts.

Every element is read as the bits of the dtype it is sent in and weighted by its position in the
whole tensor, row r and column c:

    S_r = sum_c f_c * w_rc          D_k = sum_r a_kr * S_r,  k = 1, 2          mod 2^32

The digest (D_1, D_2) of a rectangle is therefore the sum of the digests of any parts it is divided
into. A rollout rank sums over what it has received and trainer ranks over what they hold, each in
one pass, and neither needs to know how the other is sharded. A vector is one row. A tensor with
more than two dims, such as a convolution's weight, is cut along the first one only, so that the
others are the columns of a row. Words w are 32 bits: a float32, or two 16-bit elements, of which
the one in the odd column is the high half.

All factors are odd, so a change within one word is always detected. Moved or exchanged rows and
columns are detected because the factors are unrelated (SplitMix64 of the position). The checksum
detects accidents, not attacks.

`copy_table` computes the same digests of many rectangles while it copies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.verify.copy_table import (
    NO_TARGET,
    CopyTable,
    MatrixCopy,
    supports_tables,
)
from mega_agentrl.reshard.verify.factors import column_factors, row_factors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.reshard.layout import Rect

_CHUNK_BYTES = {"cpu": 2**18, "cuda": 2**26}
"""Bytes of products per pass: few enough for the CPU cache, enough to occupy a GPU."""
_MATRICES_PER_LAUNCH = 64
"""Matrices that are in memory at the same time on a GPU; they may be converted copies."""

_Matrix = tuple[torch.Tensor, tuple[int, ...]]
"""Values `[R, C]`, and the row and column of the first value in the whole tensor."""


def compute_digests(items: Iterable[tuple[torch.Tensor, Rect]]) -> np.ndarray:
    """Return `[n, 2]` uint32, the digest of each rectangle.

    Args:
        items: Values in the dtype they are sent in (16 or 32 bits), shaped like their
            rectangle, and the rectangle in the whole tensor; all on one device.

    Raises:
        ValueError: For other dtypes and shapes.
    """
    digests: list[torch.Tensor] = []
    batch: list[_Matrix] = []
    for values, rect in items:
        matrix = _as_matrix(values, rect)
        device, is_by_row = values.device, matrix[0].stride(1) == 1
        if device.type != "cpu" and is_by_row and supports_tables(device):
            batch.append(matrix)
        else:
            digests += [*_digests_of_batch(batch), _digest_of_matrix(*matrix)[None]]
            batch = []
        if len(batch) == _MATRICES_PER_LAUNCH:
            digests += _digests_of_batch(batch)
            batch = []
    digests += _digests_of_batch(batch)
    if not digests:
        return np.zeros((0, 2), dtype=np.uint32)
    return torch.cat(digests).cpu().numpy().view(np.uint32)


def _digests_of_batch(batch: Sequence[_Matrix]) -> list[torch.Tensor]:
    """Return at most one tensor, `[n, 2]` int32, from one launch of the kernel for GPUs."""
    if not batch:
        return []
    copies = [
        MatrixCopy(
            item_bytes=value_RC.element_size(),
            source=n,
            source_offset=0,
            source_stride=value_RC.stride(0),
            target=NO_TARGET,
            target_offset=0,
            target_stride=0,
            num_rows=value_RC.shape[0],
            num_columns=value_RC.shape[1],
            first_row=start[0],
            first_column=start[1],
            digest=n,
        )
        for n, (value_RC, start) in enumerate(batch)
    ]
    sum_D2 = torch.zeros(len(batch), 2, dtype=torch.int32, device=batch[0][0].device)
    CopyTable(copies).run([value_RC for value_RC, _ in batch], sum_D2)
    return [sum_D2]


def _as_matrix(values: torch.Tensor, rect: Rect) -> _Matrix:
    if tuple(values.shape) != rect.shape or values.element_size() not in (2, 4):
        expected = f"the shape of {rect} and a type of 16 or 32 bits"
        raise InputError("values of a digest", (tuple(values.shape), values.dtype), expected)
    if len(rect.start) > 2:
        if any(rect.start[1:]):
            raise InputError("rectangle of a digest", rect, "whole rows, for more than 2 dims")
        return values.flatten(1), (rect.start[0], 0)
    start = (0,) * (2 - len(rect.start)) + rect.start
    return values.reshape((1,) * (2 - values.ndim) + tuple(values.shape)), start


def _digest_of_matrix(value_RC: torch.Tensor, start: tuple[int, ...]) -> torch.Tensor:
    """Return `[2]` int32 on the device of the values."""
    word_RC, factor_C = _words_and_factors(value_RC, start[1])
    sum_R = _weighted_row_sums(word_RC, factor_C)
    last = start[0] + value_RC.shape[0]
    factor_2R = row_factors(last, value_RC.device)[:, start[0] : last]
    return (sum_R * factor_2R).sum(1, dtype=torch.int32)


def _words_and_factors(value_RC: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and the factors of their columns; `first` is the column of the first element."""
    num_columns = value_RC.shape[1]
    if value_RC.element_size() == 4:
        factor_C = column_factors(first + num_columns, value_RC.device)
        return value_RC.view(torch.int32), factor_C[first : first + num_columns]
    last = first + num_columns
    factor_C = column_factors((last + 1) // 2, value_RC.device)
    if _can_view_as_words(value_RC, first):
        return value_RC.view(torch.int32), factor_C[first // 2 : last // 2]
    # Element by element: the low half is unsigned, the high half is shifted up.
    bits_RC = value_RC.view(torch.int16).to(torch.int32) & 0xFFFF
    column_C = torch.arange(first, last, device=value_RC.device)
    factor_C = factor_C[column_C // 2] << (16 * (column_C % 2)).to(torch.int32)
    return bits_RC, factor_C


def _can_view_as_words(value_RC: torch.Tensor, first: int) -> bool:
    """Return whether pairs of elements can be read in place as words."""
    row_stride = value_RC.stride(0) if value_RC.shape[0] > 1 else 0
    offsets = (first, value_RC.shape[1], value_RC.storage_offset(), row_stride)
    return value_RC.stride(1) == 1 and not any(offset % 2 for offset in offsets)


def _weighted_row_sums(word_RC: torch.Tensor, factor_C: torch.Tensor) -> torch.Tensor:
    """Return `[R]` int32, the sums over columns modulo 2^32."""
    if word_RC.device.type == "cpu" and word_RC.stride(1) == 1:
        # torch.mv is not vectorized for integers and has a third of the speed.
        return torch.mm(factor_C[None], word_RC.t())[0]
    limit = _CHUNK_BYTES[word_RC.device.type] // (4 * word_RC.shape[1])
    parts = torch.split(word_RC, max(1, limit))
    return torch.cat([(part * factor_C).sum(1, dtype=torch.int32) for part in parts])
